"""What a run writes and shows: rows, checkpoints, messages. A disk that refuses does not end the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from a2c.algorithms.base import TrainingStats
from a2c.compute.compute import Compute
from a2c.config.config import PER_SESSION, Config
from a2c.envs.single import Spaces
from a2c.envs.vector_env import Episode
from a2c.metrics.console import Display
from a2c.metrics.files import write_atomically
from a2c.metrics.logger import RunLogger
from a2c.metrics.meters import ScoreWindow, StageTimer
from a2c.metrics.panel import Panel
from a2c.metrics.plots import draw_curve
from a2c.metrics.wandb_run import check_wandb
from a2c.processes.signals import StopRequest
from a2c.run.about import write_run_facts
from a2c.run.checkpoint import LATEST, save_checkpoint
from a2c.run.evaluator import Evaluator
from a2c.run.policies import drop_policies, keep_policy
from a2c.run.run_dir import RunLock
from a2c.run.stop import finish_reason

CURVE_EVERY = 60.0  # seconds, at least, between two drawings of curve.png
DISK_RETRY = 5.0  # seconds between two attempts to save where the disk refused
COLLAPSED = 0.05  # share of log A below which a policy's entropy is worth a warning
MetricsFunction = Callable[[], dict[str, float]]  # called for a row that is due: it costs time


class RunOutputs:
    """The files of a run directory and the display.

    Where the disk is full, read-only or gone, one message says so; rows wait in memory and the
    checkpoint is tried again later.
    """

    def __init__(
        self, lock: RunLock, config: Config, spaces: Spaces, scores: ScoreWindow, timer: StageTimer, stop: StopRequest
    ) -> None:
        """Nothing is written before `open`; `scores` and `timer` are fed by `log`.

        ValueError if `config` asks for a package that is missing.
        """
        check_wandb(config)
        self.lock, self.run_dir, self.config, self.scores, self.timer = lock, lock.run_dir, config, scores, timer
        self.uniform_entropy = math.log(spaces.n_actions)  # nats
        self.display = Display(Panel(config, spaces.frames_per_step, lock.given), timer, stop)
        self.evaluator = Evaluator(self.run_dir, config)
        self.logger: RunLogger  # from `open` on
        self.is_open = False
        self.row: dict[str, float] = {}  # the last row of metrics
        self.messages: set[str] = set()
        self.retry_at = self.policy_retry_at = 0.0  # when a disk that has refused a checkpoint, a policy is tried again
        self.drawn_at = time.perf_counter()  # when curve.png was drawn, or the run began
        self.drawing = 0.0  # seconds that the last drawing took

    def starting(self) -> AbstractContextManager[object]:
        """A bar that moves on a terminal while the environments start."""
        return self.display.starting()

    def open(self, resumed: Config | None = None, env_steps: int = 0, episodes_continue: bool = False) -> None:
        """Open files and display.

        A run that is `resumed` (its config until now) drops the rows and the kept policies after `env_steps`.
        """
        self.logger = RunLogger(self.run_dir, self.config, env_steps if resumed else None)
        self.is_open = True
        self.display.start()
        if resumed:
            self._attempt(lambda: drop_policies(self.run_dir, env_steps))
            episodes = "its episodes continue" if episodes_continue else "every environment starts a new episode"
            self.message(f"resumed at {env_steps:,} env_steps; {episodes}")
            self._note_changes(resumed, env_steps)
        self._attempt(lambda: self.evaluator.start(env_steps))

    def write_about(self, compute: Compute) -> None:
        """Write about.json, what the run depends on besides its settings, or a message: no run ends because of it."""
        path = self.run_dir / "about.json"
        try:
            write_run_facts(path, compute, new=self.config.resume is None)
        except Exception as error:
            self.message(f"{path} could not be written: {error}")

    def message(self, text: str, once: bool = False) -> None:
        """Show one line; `once`: only the first time in this run."""
        if not (once and text in self.messages):
            self.messages.add(text)
            self.display.message(text)

    def _note_changes(self, before: Config, env_steps: int) -> None:
        """Show which settings a resumed run changes, and keep the old ones in config-until-`env_steps`.json."""
        old, new = vars(before), vars(self.config)
        changes = [name for name in new if name not in PER_SESSION and old[name] != new[name]]
        for name in changes:
            self.message(f"{name}: {old[name]} -> {new[name]}")
        if changes:
            path = self.run_dir / f"config-until-{env_steps}.json"
            self._attempt(lambda: write_atomically(path, before.to_json().encode()))

    def log(self, stats: TrainingStats, learner_metrics: MetricsFunction, last: bool = False) -> None:
        """Count `stats`, write a row per finished episode, and a row of METRICS when one is due or it is the `last`."""
        self.scores.add([one.score for one in stats.episodes], [one.length for one in stats.episodes])
        self.timer.add(stats.seconds, stats.env_steps)
        if stats.episodes:
            self._log_episodes(stats.episodes)
        due = last or self.timer.row_seconds >= self.config.log_every
        if due and self.env_steps > self.timer.row_steps:
            self._log_row(self._metrics(learner_metrics))
            self.timer.begin_row(self.env_steps)

    def _metrics(self, learner_metrics: MetricsFunction) -> dict[str, float]:
        """A row of METRICS; those of an update are missing before the first one."""
        return learner_metrics() | self.scores.metrics() | self.timer.metrics() | self.evaluator.metrics(self.env_steps)

    def _log_episodes(self, episodes: list[Episode]) -> None:
        self.logger.add_episodes(self.env_steps, self.timer.seconds, episodes)
        self._attempt(self.logger.write)

    def _log_row(self, row: dict[str, float]) -> None:
        self.row = row
        self.logger.add_metrics(row)
        self._attempt(self.logger.write)
        self._pass_on_messages()
        self.display.show(row)
        if row.get("entropy", math.inf) < COLLAPSED * self.uniform_entropy:
            self.message(
                f"the policy's entropy has fallen below {COLLAPSED:.0%} of a uniform policy's: it hardly explores any "
                "more; if the score is poor, try a higher entropy_coef or a lower learning_rate",
                once=True,
            )

    @property
    def env_steps(self) -> int:
        """Decisions that have been logged."""
        return self.timer.env_steps

    @property
    def can_save(self) -> bool:
        """False for a few seconds after the disk has refused a checkpoint."""
        return time.perf_counter() >= self.retry_at

    @property
    def can_keep_policy(self) -> bool:
        """False for a few seconds after the disk has refused a policy file, or a checkpoint."""
        return self.can_save and time.perf_counter() >= self.policy_retry_at

    def save(self, name: str, state: dict[str, Any]) -> bool:
        """Write the checkpoint `state` to the file `name`; False if the disk refuses."""
        self._attempt(lambda: self.logger.write(sync=True))  # the checkpoint counts these rows
        saved = self._attempt(lambda: save_checkpoint(self.run_dir / name, state, keep_previous=name == LATEST))
        if not saved:
            self.retry_at = time.perf_counter() + DISK_RETRY
        return saved

    def keep_policy(self, state: dict[str, Any]) -> bool:
        """Write the policy `state` to `policies/`; False if the disk refuses."""
        kept = self._attempt(lambda: keep_policy(self.run_dir, state))
        if not kept:
            self.policy_retry_at = time.perf_counter() + DISK_RETRY
        return kept

    def rewind(self, env_steps: int) -> None:
        """Drop the rows and the kept policies after `env_steps`, which will be replayed."""
        self.logger.rewind(env_steps)
        self._attempt(lambda: drop_policies(self.run_dir, env_steps))
        self._attempt(lambda: self.evaluator.rewind(env_steps))
        self.timer.begin_row(env_steps)
        self.row = {}
        self.display.panel.rewind(env_steps)

    def finish(self, reason: str, learner_metrics: MetricsFunction) -> None:
        """Close the files, draw the learning curve, show the summary of a run that ended because of `reason`."""
        self.close()
        self._draw_curve()
        finished = bool(finish_reason(self.config, self.env_steps, self.scores))
        self.display.summary(self.row or self._metrics(learner_metrics), reason, finished)

    def close(self) -> None:
        """Write the rows that wait, close the files, remove the live display; may be called twice."""
        with ExitStack() as closing_all:
            closing_all.callback(self.display.close)
            closing_all.callback(self.evaluator.close)
            if self.is_open:
                closing_all.callback(self._pass_on_messages)
                closing_all.callback(self.logger.close)
                if not self._attempt(self.logger.write):
                    self.message(f"the last rows are lost: they could not be written to {self.run_dir}", once=True)

    def _pass_on_messages(self) -> None:
        for text in (*self.logger.messages(), *self.evaluator.messages()):
            self.message(text, once=True)

    def draw_curve_when_due(self) -> None:
        """Draw curve.png, if that was long ago compared with the time that it takes."""
        if time.perf_counter() - self.drawn_at >= max(CURVE_EVERY, 100 * self.drawing):
            self._draw_curve()

    def _draw_curve(self) -> None:
        began = time.perf_counter()
        title = f"{self.config.env}, seed {self.config.seed}"
        try:
            self._attempt(lambda: draw_curve(self.run_dir, title, self.config.target_score))
        except Exception as error:  # episodes.csv has been edited, a score is too large to draw, and so on
            self.message(f"curve.png could not be drawn: {error}", once=True)
        self.drawn_at = time.perf_counter()
        self.drawing = self.drawn_at - began

    def _attempt(self, write: Callable[[], object]) -> bool:
        try:
            self.lock.keep()
            write()
        except OSError as error:
            reason = error.strerror or error
            self.message(f"cannot write to {self.run_dir}: {reason}; the run continues and tries again", once=True)
            return False
        return True

"""What a run leaves behind and shows: rows, checkpoints, messages. A disk that refuses does not end the run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from a2c.config.config import Config
from a2c.envs.vector_env import Episode
from a2c.learner import Learner
from a2c.metrics.console import Display
from a2c.metrics.files import write_atomically
from a2c.metrics.logger import RunLogger
from a2c.metrics.meters import ScoreWindow, StageTimer
from a2c.metrics.plots import draw_curve
from a2c.run.checkpoint import LATEST, save_checkpoint
from a2c.run.run_dir import RunLock
from a2c.update import learning_rate

BEST = "best.pt"
DISK_RETRY = 5.0  # seconds between two tries to save where the disk refused
OF_A_SESSION = ("run_dir", "resume", "stop_after")  # settings that a resumed run has for itself
COLLAPSED = 0.05  # share of log A under which a policy's entropy is worth a warning


class RunOutputs:
    """The files of a run directory and the display, behind one door.

    Where the disk is full, read-only or gone, one message says so; rows wait in memory and the
    checkpoint is tried again.
    """

    def __init__(self, lock: RunLock, config: Config, resumed_at: int | None) -> None:
        """`resumed_at`: env_steps at which a resumed run goes on; rows after them are dropped."""
        self.lock, self.run_dir, self.config = lock, lock.run_dir, config
        self.logger = RunLogger(self.run_dir, config, resumed_at)
        self.display = Display(config)
        # env_steps of the newest checkpoint; a new run has none, so one is due.
        self.saved_at = -config.checkpoint_every if resumed_at is None else resumed_at
        self.said: set[str] = set()
        self.retry_at = 0.0  # when to try a disk again that has refused

    def message(self, text: str, once: bool = False) -> None:
        """One line for the person who watches; `once`: not again in this run."""
        if not (once and text in self.said):
            self.said.add(text)
            self.display.message(text)

    def note_changes(self, before: Config, env_steps: int) -> None:
        """Say which settings a resumed run changes, and keep those until `env_steps` in a file of their own."""
        old, new = vars(before), vars(self.config)
        changes = [name for name in new if name not in OF_A_SESSION and old[name] != new[name]]
        for name in changes:
            self.message(f"{name}: {old[name]} -> {new[name]}")
        if changes:
            path = self.run_dir / f"config-until-{env_steps}.json"
            self._attempt(lambda: write_atomically(path, before.to_json().encode()))

    def episodes(self, env_steps: int, seconds: float, games: Sequence[Episode]) -> None:
        """A row per finished game."""
        self._attempt(lambda: self.logger.episodes(env_steps, seconds, games))

    def metrics(self, row: dict[str, float], n_actions: int) -> None:
        """A row of METRICS, written and shown; a warning where the policy has stopped exploring."""
        self._attempt(lambda: self.logger.metrics(row))
        self.display.show(row)
        if row.get("entropy", math.inf) < COLLAPSED * math.log(max(n_actions, 2)):
            self.message(
                f"the policy's entropy has fallen under {COLLAPSED:.0%} of a uniform policy's: it hardly explores any "
                "more; if the score is poor, try a higher entropy_coef or a lower learning_rate",
                once=True,
            )

    @property
    def can_save(self) -> bool:
        """False for a while after a refusal of the disk."""
        return time.perf_counter() >= self.retry_at

    def save(self, name: str, state: dict[str, Any]) -> bool:
        """Write `state` to the file `name`; False where the disk refuses."""

        def write() -> None:
            self.logger.keep_config()
            save_checkpoint(self.run_dir / name, state, keep_previous=name == LATEST)

        if not self._attempt(write):
            self.retry_at = time.perf_counter() + DISK_RETRY
            return False
        if name == LATEST:
            self.saved_at = state["env_steps"]
        return True

    def rewind(self, env_steps: int) -> None:
        """Drop the rows after `env_steps`, which will be replayed."""
        self.logger.rewind(env_steps)

    def report(self, row: dict[str, float], outcome: str) -> None:
        """Draw the curve and print the table that ends a run."""
        title = f"{self.config.env}, seed {self.config.seed}"
        with suppress(ValueError, TypeError, KeyError):  # somebody's editor was in episodes.csv
            self._attempt(lambda: draw_curve(self.run_dir, title, self.config.target_score))
        self.lock.release()  # the end of the run had freed it, and it was taken anew for the picture
        self.display.summary(row, outcome, self.run_dir)

    def close(self) -> None:
        """Write what waits, close the files, give the terminal back."""
        try:
            self._attempt(self.logger.close)
        finally:
            self.display.close()

    def _attempt(self, write: Callable[[], object]) -> bool:
        try:
            self.lock.keep()
            write()
        except OSError as error:
            reason = error.strerror or error
            self.message(f"cannot write to {self.run_dir}: {reason}; the run goes on and tries again", once=True)
            return False
        return True


def metrics_row(learner: Learner, scores: ScoreWindow, timer: StageTimer) -> dict[str, float]:
    """All of METRICS as they stand; those of the newest update are missing while there is none."""
    elapsed = timer.row_seconds
    return {
        "env_steps": learner.env_steps,
        "seconds": timer.seconds,
        "updates": learner.updates,
        "episodes": scores.episodes,
        "reward": scores.last_score,
        "reward_100": scores.mean,
        "best_reward_100": scores.best_mean,
        "speed": (learner.env_steps - timer.row_steps) / elapsed,
        "learning_rate": learning_rate(learner.config, learner.env_steps),
        **{f"share_{stage}": seconds / elapsed for stage, seconds in timer.spent.items()},
        **learner.update_metrics(),
    }

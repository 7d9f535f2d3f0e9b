"""The synchronous trainer: collect a rollout, learn it batch by batch, log, save."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from a2c.batch import SlidingWindows
from a2c.checkpoint import load_checkpoint, load_network, save_checkpoint
from a2c.compute import Compute, refresh
from a2c.config import Config
from a2c.curve import draw_curve
from a2c.display import Display, score
from a2c.envs import make_groups, probe_spaces
from a2c.games import GameEnvs, WorkerError
from a2c.logger import RunLogger, Scores, learning_metrics, run_directory
from a2c.networks import make_network, resolve
from a2c.rollout import Collector, Rollout
from a2c.signals import StopRequest, stop_on_signals
from a2c.update import Batch, Update, learn, learning_rate, make_optimizer

LATEST, BEST = "latest.pt", "best.pt"
COUNTERS = ("env_steps", "updates", "seconds", "saved_best", "learning")  # plain values that a checkpoint holds
NORMALIZER_STRIDE = 4  # every fourth step of a rollout feeds the pixel statistics: frames in between look alike


class Trainer:
    """One training run; `run()` plays it to its end and returns the process's exit code.

    Refusals come in the constructor, before a worker starts: ValueError or its CheckpointError.
    """

    def __init__(self, config: Config) -> None:
        self.run_dir = run_directory(config)
        self.input_shape, self.n_actions = probe_spaces(config)
        config = self.config = resolve(config, self.input_shape)
        self.compute = Compute(config)
        torch.manual_seed(config.seed)
        self.net = make_network(config, self.input_shape, self.n_actions)
        self.twin = self.compute.working_copy(self.net)
        self.optimizer = make_optimizer(self.net, config)
        self.windows = SlidingWindows(
            config.num_envs, config.rollout_steps, config.sliding_batch, config.gamma, config.reward_clip
        )
        self.scores = Scores()
        self.env_steps = self.updates = 0
        self.seconds = 0.0  # wall time of training, earlier sessions included
        self.newest: Update | None = None
        self.learning: dict[str, float] = {}  # metrics of the newest update
        self.groups: list[GameEnvs] = []
        self.logger: RunLogger | None = None
        self.display: Display | None = None
        self.row: dict[str, float] = {}  # the newest row of metrics
        self.spent = {"env": 0.0, "act": 0.0, "learn": 0.0}  # seconds since that row
        self.saved_best = -math.inf  # mean score of the policy in best.pt
        self.games_go_on = False  # a resumed run took up its games where they were
        self.stop = StopRequest()
        self.checkpoint = self._restore() if config.resume else None

    def run(self) -> int:
        """Train until the target, the budget or a signal, once. 0, or 128 + the signal's number.

        Raises WorkerError when an environment fails (all that was learned is saved first) and
        FloatingPointError when the gradient is no number (the last checkpoint stays).
        """
        with stop_on_signals(self.stop):
            try:
                self.start()
                self._open_log()
                while not self._outcome():
                    rollout = self.advance()
                    self._count(rollout)
                    self._log_and_save()
                self._log_and_save(last=True)
            except WorkerError:
                self._log_and_save(last=True)
                if not self.stop:  # a signal to the whole process group ends the workers too
                    raise
            finally:
                self.close()
            self._report()
        return 128 + self.stop.number if self.stop else 0

    def advance(self) -> Rollout:
        """The algorithm: collect a rollout with the policy as it is, then learn it."""
        rollout = self.collector.collect()
        began = time.perf_counter()
        self.learn(rollout)
        self._observe(rollout.obs[::NORMALIZER_STRIDE])
        self.env_steps += len(rollout)
        self.spent["learn"] += time.perf_counter() - began
        self.spent["env"] += self.collector.env_seconds
        self.spent["act"] += self.collector.act_seconds
        return rollout

    def learn(self, rollout: Rollout) -> None:
        """One optimiser step on each batch of the rollout."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.env_steps)
        for i, batch in enumerate(self._batches(rollout)):
            moved = i > 0  # the policy is no longer the one that acted
            self.newest = learn(self.net, self.twin, self.optimizer, batch, self.config, self.compute, moved)
            self.updates += 1
        if self.newest is not None and not math.isfinite(self.newest.grad_norm):
            raise FloatingPointError(
                f"the gradient's norm is {float(self.newest.grad_norm)} at update {self.updates} "
                f"(loss {float(self.newest.loss.total)}); the last checkpoint is kept: try a lower learning_rate"
            )

    def start(self) -> None:
        """Start the environments and the collector."""
        if self.groups:
            raise RuntimeError("a Trainer runs once; make another one")
        config, compute, state = self.config, self.compute, self.checkpoint
        self.groups = make_groups(config, compute.env_groups, compute.threads_per_group, self.env_steps)
        steps = 1 if config.sliding_batch else config.rollout_steps
        self.collector = Collector(self.groups, self.twin, steps, compute, config.seed + self.env_steps)
        if state is None:
            self._observe(self.collector.buffers.next_obs[None])
        else:
            self.games_go_on = self.collector.load_state_dict(state["collector"])

    def close(self) -> None:
        """End threads, environments, files and display, each whatever becomes of the others."""
        with ExitStack() as closing:  # calls back in reverse: the threads that use environments end first
            for part in (self.display, self.logger, *self.groups, self.compute):
                if part is not None:
                    closing.callback(part.close)

    def _batches(self, rollout: Rollout) -> Iterable[Batch]:
        if self.config.sliding_batch:
            return self.windows.push(rollout)
        return rollout.split(self.config.batches_per_rollout)

    def _observe(self, obs: torch.Tensor) -> None:
        """Feed the newest frames of `obs [T, N, 4, H, W]` to the normaliser, if there is one."""
        if self.net.normalizer is not None:
            self.net.normalizer.update(obs[:, :, -1].flatten(0, 1))

    def _outcome(self) -> str:
        """Why the run is over, or an empty text while it is not."""
        target = self.config.target_score
        if self.stop:
            return f"stopped by {self.stop.name}"
        if target is not None and self.scores.full and self.scores.mean >= target:
            return f"reached a mean score of {score(self.scores.mean)}"
        if self.config.stop_after and self.env_steps >= self.config.stop_after:
            return f"stopped after {self.env_steps:,} env_steps"
        return "all environment steps played" if self.env_steps >= self.config.total_env_steps else ""

    def _open_log(self) -> None:
        """Logger and display; they start threads, so they come after the worker processes."""
        resumed = self.checkpoint is not None
        self.logger = RunLogger(self.run_dir, self.config, self.env_steps if resumed else None)
        self.display = Display(self.config)
        if resumed:
            games = "its games go on" if self.games_go_on else "every environment starts a new game"
            self.display.say(f"resumed at {self.env_steps:,} env_steps; {games}")
        if self.config.cuda and self.compute.device.type != "cuda":
            self.display.say("--cuda: torch finds no GPU here, so this run uses the CPU")
        self.started = time.perf_counter() - self.seconds
        self.saved_at = self.env_steps
        self._begin_row()

    def _begin_row(self) -> None:
        self.row_began, self.row_steps = time.perf_counter(), self.env_steps
        self.spent = dict.fromkeys(self.spent, 0.0)

    def _count(self, rollout: Rollout) -> None:
        self.seconds = time.perf_counter() - self.started
        self.scores.add(game.score for game in rollout.episodes)
        self.logger.episodes(self.env_steps, self.seconds, rollout.episodes)

    def _log_and_save(self, last: bool = False) -> None:
        """Write a row of metrics and a checkpoint when they are due or, at the end, when they are missing."""
        row_due = last or time.perf_counter() - self.row_began >= self.config.log_every
        if row_due and self.env_steps > self.row_steps:
            self.row = self._row()
            self.logger.metrics(self.row)
            self.display.show(self.row)
            self._begin_row()
        distance = self.env_steps - self.saved_at
        if distance >= self.config.checkpoint_every or (last and distance):
            self._save()

    def _row(self) -> dict[str, float]:
        elapsed = time.perf_counter() - self.row_began
        return {
            "env_steps": self.env_steps,
            "seconds": self.seconds,
            "updates": self.updates,
            "games": self.scores.games,
            "reward": self.scores.newest,
            "reward_100": self.scores.mean,
            "best_reward_100": self.scores.best_mean,
            "speed": (self.env_steps - self.row_steps) / elapsed,
            "learning_rate": learning_rate(self.config, self.env_steps),
            **{f"share_{stage}": seconds / elapsed for stage, seconds in self.spent.items()},
            **self._learning_metrics(),
        }

    def _learning_metrics(self) -> dict[str, float]:
        """Metrics of the newest update, of an earlier session's where this one has none yet."""
        if self.newest is not None:
            self.learning = learning_metrics(self.newest, self.net, self.config)
        return self.learning

    def _save(self) -> None:
        self._learning_metrics()
        is_best = self.scores.full and self.scores.mean > self.saved_best
        self.saved_best = self.scores.mean if is_best else self.saved_best
        state = {
            "config": self.config.to_json(),
            "input_shape": list(self.input_shape),
            "n_actions": self.n_actions,
            "network": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "collector": self.collector.state_dict(),
            "windows": self.windows.state_dict(),
            "scores": self.scores.state_dict(),
            **{name: getattr(self, name) for name in COUNTERS},
        }
        for name in (BEST, LATEST) if is_best else (LATEST,):
            save_checkpoint(self.run_dir / name, state, keep_previous=name == LATEST)
        self.saved_at = self.env_steps

    def _restore(self) -> dict[str, Any]:
        """Take over what the newest checkpoint holds; its generators wait for the collector."""
        path = self.run_dir / LATEST
        state = load_checkpoint(path)
        load_network(self.net, state, path)
        refresh(self.twin, self.net)
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # the flags of this run hold, not those of the last
            group["eps"] = self.config.adam_eps
        self.windows.load_state_dict(state["windows"])
        self.scores.load_state_dict(state["scores"])
        for name in COUNTERS:
            setattr(self, name, state[name])
        return state

    def _report(self) -> None:
        """Draw the curve and print the table that ends a run."""
        draw_curve(self.run_dir, f"{self.config.env}, seed {self.config.seed}", self.config.target_score)
        self.display.summary(self.row or self._row(), self._outcome(), self.run_dir)

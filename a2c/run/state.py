"""The state from which a run can continue: a copy in memory for failing workers, and the checkpoints on disk."""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from a2c.algorithms.base import Algorithm
from a2c.config.config import Config
from a2c.envs.single import Spaces
from a2c.envs.trial import restores_exactly
from a2c.learner import Learner
from a2c.metrics.meters import ScoreWindow, StageTimer
from a2c.run.checkpoint import BEST, LATEST, raising_checkpoint_error
from a2c.run.outputs import RunOutputs

SNAPSHOT_EVERY = 25  # rollouts between two copies in memory; one of fewer than 20 steps counts as a part of one
DISK_PATIENCE = 600.0  # seconds that a run waits at its end for a disk that refuses the last checkpoint


class RunState:
    """What the next rollout depends on: the learner, the algorithm's running episodes, the scores and the clock."""

    def __init__(
        self,
        config: Config,
        spaces: Spaces,
        learner: Learner,
        algorithm: Algorithm,
        scores: ScoreWindow,
        timer: StageTimer,
    ) -> None:
        self.config, self.spaces, self.learner, self.algorithm = config, spaces, learner, algorithm
        self.scores, self.timer, self.ranks = scores, timer, learner.compute.ranks
        self.in_memory: dict[str, Any] = {}  # the last copy, with the keys of a checkpoint
        self.path: Path | None = None  # of the checkpoint that was loaded
        self.started = False
        self.seconds_before = 0.0  # wall time of earlier sessions
        self.saved_best = -math.inf  # mean score of the policy in best.pt
        self.saved_at = -config.checkpoint_every  # env_steps of latest.pt; a new run has none, so one is due
        self.kept_at = 0  # env_steps of the last policy file, or of the start
        self.distance = SNAPSHOT_EVERY * config.num_envs * max(config.rollout_steps, 20)  # env_steps between two copies

    @property
    def env_steps(self) -> int:
        """Decisions that were learned from so far."""
        return self.learner.env_steps

    def load(self, path: Path, checkpoint: dict[str, Any]) -> None:
        """Continue from the `checkpoint` at `path`; its running episodes are restored by `start`.

        CheckpointError if its content is damaged.
        """
        self.path = path
        with raising_checkpoint_error(path):
            self.in_memory = checkpoint | {"algorithm": self._own_part(checkpoint["algorithm"])}
            self.restore()
            self.saved_at = self.kept_at = self.env_steps
            self.saved_best, self.seconds_before = float(checkpoint["saved_best"]), float(checkpoint["seconds"])

    def _own_part(self, algorithm: dict[str, Any]) -> dict[str, Any] | None:
        """What this rank saved of the algorithm's state; None if there were more or fewer ranks."""
        parts = algorithm.get("ranks", [algorithm])
        return parts[self.ranks.rank] if len(parts) == self.ranks.size else None

    def check_new(self) -> None:
        """RuntimeError after `start` or `close`."""
        if self.started:
            raise RuntimeError("a Trainer runs once; make another one")

    def close(self) -> None:
        """Let a later `start` raise RuntimeError."""
        self.started = True

    def start(self) -> bool:
        """Start the algorithm and the clock; True if the running episodes of a loaded checkpoint continue.

        CheckpointError if these episodes are damaged, RuntimeError when called again.
        """
        self.check_new()
        self.started, continued = True, False
        if self.path is None:
            self.algorithm.start(new_run=True)
        else:
            with raising_checkpoint_error(self.path):
                if not all(self.ranks.on_every_rank(self._can_restore)):  # on every rank, or on none
                    self.in_memory["algorithm"] = self._without_episodes()
            self.algorithm.start(new_run=False)
            with raising_checkpoint_error(self.path):
                continued = self._continue(self.in_memory["algorithm"])
        self.timer.start(self.seconds_before, self.env_steps)
        self.snapshot()
        return continued

    def _can_restore(self) -> bool:
        """Whether the episodes of a loaded checkpoint, where it has any, can be restored exactly."""
        episodes = self.in_memory["algorithm"]
        if not episodes or self.config.algorithm != "a2c":
            return True
        rows, compute = self.ranks.rows(self.config.num_envs), self.learner.compute
        sizes = [len(part) for part in np.array_split(rows, compute.env_groups)]  # as `make_groups` makes them
        saved = [group and len(group["scores"]) for group in episodes["envs"]]
        return saved == sizes and self.config.backend != "native" and restores_exactly(self.config, episodes["envs"])

    def _without_episodes(self) -> dict[str, Any] | None:
        """The algorithm's state in memory, for which new episodes begin."""
        state = self.in_memory["algorithm"]
        return state and {**state, "envs": [None for _ in state["envs"]]}

    def _continue(self, episodes: dict[str, Any] | None) -> bool:
        """Continue `episodes`, which are used up; whether every rank can."""
        return all(self.ranks.on_every_rank(lambda: self.algorithm.load_state_dict(episodes) if episodes else False))

    def restart(self) -> bool:
        """Start the algorithm at the copy in memory, after `restore`; True if the episodes in it continue."""
        self.algorithm.start(new_run=False)
        return self._continue(copy.deepcopy(self.in_memory["algorithm"]))

    def snapshot(self) -> dict[str, Any]:
        """Copy the state into memory and return it. FloatingPointError if a parameter is NaN or infinite."""
        state = {
            **self._origin(),
            **self.learner.state_dict(),
            "scores": self.scores.state_dict(),
            "seconds": self.timer.seconds,
        }
        # Which may fail in a worker.
        self.ranks.on_every_rank(lambda: state.update(algorithm=self.algorithm.state_dict()))
        state = copy.deepcopy(state)
        check_parameters(state["network"])  # workers of A3C may have changed it since the learner last looked
        self.in_memory = state
        return state

    def _origin(self) -> dict[str, Any]:
        """What tells a checkpoint which runs it fits."""
        shape, n_actions = list(self.spaces.obs_shape), self.spaces.n_actions
        return {"config": self.config.to_json(), "input_shape": shape, "n_actions": n_actions}

    def restore(self) -> None:
        """Set learner and scores to the copy in memory. What stays: wall time, and which policy is in best.pt."""
        self.learner.load_state_dict(self.in_memory)  # both copy what they take
        self.scores.load_state_dict(self.in_memory["scores"])
        self.kept_at = min(self.kept_at, self.env_steps)

    def save_when_due(self, outputs: RunOutputs) -> None:
        """Write a policy file and a checkpoint when they are due, else copy the state into memory when that is due."""
        self.keep_policy(outputs)
        due = self.env_steps - self.saved_at >= self.config.checkpoint_every
        if due and self.ranks.on_rank_0(lambda: outputs.can_save):
            if self.save(outputs):
                outputs.draw_curve_when_due()
        elif self.env_steps - self.in_memory["env_steps"] >= self.distance:
            self.snapshot()

    def save_last(self, outputs: RunOutputs) -> None:
        """Write the checkpoint that ends a run, where it is missing, and a policy file that is due.

        OSError if the disk refuses for too long.
        """
        end = time.perf_counter() + DISK_PATIENCE
        while True:
            kept = self.ranks.on_rank_0(lambda: self.keep_policy(outputs))
            can_save = self.ranks.on_rank_0(lambda: outputs.can_save)
            saved = self.saved_at == self.env_steps or (can_save and self.save(outputs))
            if saved and kept:
                return
            if self.ranks.on_rank_0(lambda: time.perf_counter() > end):
                what = "policy file" if saved else "checkpoint"
                raise OSError(f"the last {what} could not be written to {outputs.run_dir}")
            time.sleep(0.5)

    def keep_policy(self, outputs: RunOutputs) -> bool:
        """Write a policy file at the first call at or after a multiple of `keep_policy_every` (or `eval_every`).

        False if one is due that the disk refuses. FloatingPointError if a parameter is NaN or infinite.
        """
        every = self.config.keep_policy_every or self.config.eval_every
        if not every or self.env_steps // every == self.kept_at // every:
            return True
        if not outputs.can_keep_policy:
            return False
        # Copied: the workers of A3C go on changing the parameters.
        network = {name: value.to("cpu", copy=True) for name, value in self.learner.net.state_dict().items()}
        check_parameters(network)
        if not outputs.keep_policy({**self._origin(), "network": network, "env_steps": self.env_steps}):
            return False
        self.kept_at = self.env_steps
        return True

    def save(self, outputs: RunOutputs) -> bool:
        """Write latest.pt, and best.pt where the policy is better than the one in it; False if the disk refuses."""
        state = self.in_memory if self.in_memory["env_steps"] == self.env_steps else self.snapshot()
        parts = self.ranks.gather(state["algorithm"])
        state = {**state, "algorithm": {"ranks": parts} if len(parts) > 1 else state["algorithm"]}

        def write() -> bool:
            mean = self.scores.mean
            if self.scores.full and mean > self.saved_best and outputs.save(BEST, {**state, "saved_best": mean}):
                self.saved_best = mean
            return outputs.save(LATEST, {**state, "saved_best": self.saved_best})

        saved = self.ranks.on_rank_0(write)
        self.saved_at = self.env_steps if saved else self.saved_at
        return saved


def check_parameters(network: dict[str, Tensor]) -> None:
    """FloatingPointError if a network's state holds NaN or infinity."""
    if not all(value.isfinite().all() for value in network.values() if value.is_floating_point()):
        raise FloatingPointError("the network's parameters are NaN or infinite; the last checkpoint is kept")

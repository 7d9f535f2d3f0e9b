"""The state from which a run can continue: a copy in memory for failing workers, and the checkpoints on disk."""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import Any

from a2c.algorithms.base import Algorithm
from a2c.config.config import Config
from a2c.envs.single import Spaces
from a2c.envs.trial import restores_exactly
from a2c.learner import Learner, check_finite
from a2c.metrics.meters import ScoreWindow, StageTimer
from a2c.run.checkpoint import LATEST, raising_checkpoint_error
from a2c.run.outputs import RunOutputs

BEST = "best.pt"
CAPTURE_EVERY = 25  # rollouts (of 20 decisions) between two copies in memory
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
        self.scores, self.timer = scores, timer
        self.in_memory: dict[str, Any] = {}  # the last copy, with the keys of a checkpoint
        self.path: Path | None = None  # of the checkpoint that was loaded
        self.seconds_before = 0.0  # wall time of earlier sessions
        self.saved_best = -math.inf  # mean score of the policy in best.pt
        self.saved_at = -config.checkpoint_every  # env_steps of latest.pt; a new run has none, so one is due
        # env_steps between two copies in memory
        self.distance = CAPTURE_EVERY * config.num_envs * max(config.rollout_steps, 20)

    @property
    def env_steps(self) -> int:
        """Decisions that were learned from so far."""
        return self.learner.env_steps

    def load(self, path: Path, checkpoint: dict[str, Any]) -> None:
        """Continue from the `checkpoint` at `path`; its running episodes are restored by `start`.

        CheckpointError where its content is damaged.
        """
        self.path, self.in_memory = path, checkpoint
        with raising_checkpoint_error(path):
            self.restore()
            self.saved_at = self.env_steps
            self.saved_best, self.seconds_before = float(checkpoint["saved_best"]), float(checkpoint["seconds"])

    def start(self) -> bool:
        """Start the algorithm and the clock; True where the running episodes of a loaded checkpoint continue.

        CheckpointError where these episodes are damaged.
        """
        continued = False
        if self.path is None:
            self.algorithm.start(new_run=True)
        else:
            episodes = self.in_memory["algorithm"]
            with raising_checkpoint_error(self.path):
                if self.config.algorithm == "a2c" and not restores_exactly(self.config, episodes["envs"]):
                    episodes["envs"] = [None for _ in episodes["envs"]]
            self.algorithm.start(new_run=False)
            with raising_checkpoint_error(self.path):
                continued = self.algorithm.load_state_dict(episodes)
        self.timer.start(self.seconds_before, self.env_steps)
        self.capture()
        return continued

    def restart(self) -> bool:
        """Start the algorithm at the copy in memory, after `restore`; True where the episodes in it continue."""
        self.algorithm.start(new_run=False)
        return self.algorithm.load_state_dict(copy.deepcopy(self.in_memory["algorithm"]))

    def capture(self) -> dict[str, Any]:
        """Copy the state into memory and return it. FloatingPointError where a parameter is NaN or infinite."""
        state = {
            "config": self.config.to_json(),
            "input_shape": list(self.spaces.obs_shape),
            "n_actions": self.spaces.n_actions,
            **self.learner.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "scores": self.scores.state_dict(),
            "seconds": self.timer.seconds,
        }
        state = copy.deepcopy(state)
        check_finite(state["network"])  # workers of A3C may have changed it since the learner last looked
        self.in_memory = state
        return state

    def restore(self) -> None:
        """Set learner and scores to the copy in memory. What stays: wall time, and which policy is in best.pt."""
        self.learner.load_state_dict(self.in_memory)  # both copy what they take
        self.scores.load_state_dict(self.in_memory["scores"])

    def save_when_due(self, outputs: RunOutputs) -> None:
        """Write a checkpoint when it is due, else copy the state into memory when that is due."""
        if self.env_steps - self.saved_at >= self.config.checkpoint_every and outputs.can_save:
            self.save(outputs)
        elif self.env_steps - self.in_memory["env_steps"] >= self.distance:
            self.capture()

    def save_last(self, outputs: RunOutputs) -> None:
        """Write the checkpoint that ends a run, where it is missing; OSError where the disk refuses for too long."""
        end = time.perf_counter() + DISK_PATIENCE
        while self.saved_at != self.env_steps and not (outputs.can_save and self.save(outputs)):
            if time.perf_counter() > end:
                raise OSError(f"the last checkpoint could not be written to {outputs.run_dir}")
            time.sleep(0.5)

    def save(self, outputs: RunOutputs) -> bool:
        """Write latest.pt, and best.pt where the policy is better than the one in it; False where the disk refuses."""
        state = self.in_memory if self.in_memory["env_steps"] == self.env_steps else self.capture()
        mean = self.scores.mean
        if self.scores.full and mean > self.saved_best and outputs.save(BEST, {**state, "saved_best": mean}):
            self.saved_best = mean
        if not outputs.save(LATEST, {**state, "saved_best": self.saved_best}):
            return False
        self.saved_at = self.env_steps
        return True

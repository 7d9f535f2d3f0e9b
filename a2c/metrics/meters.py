"""What is measured: scores of finished games, wall time by stage. `METRICS` names everything that is logged."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

METRICS = {
    "env_steps": "agent decisions summed over environments (count)",
    "seconds": "wall time of training, all sessions of the run together (s)",
    "updates": "optimiser steps (count)",
    "episodes": "finished games (count)",
    "reward": "score of the newest game (game points)",
    "reward_100": "mean score of the last 100 games (game points)",
    "best_reward_100": "highest reward_100 so far, once 100 games are finished (game points)",
    "speed": "agent decisions per second since the last row (1/s)",
    "advantage": "mean of return - value over the newest batch (return)",
    "values": "mean of the value head over the newest batch (return)",
    "batch_rewards": "mean bootstrapped return of the newest batch (return)",
    "loss_entropy": "-entropy_coef * entropy of the newest batch",
    "loss_policy": "policy gradient term of the newest batch",
    "loss_value": "mean squared error of the value head over the newest batch (squared return)",
    "loss_total": "loss_policy + value_coef * loss_value + loss_entropy",
    "entropy": "mean entropy of the policy (nats; log A is a uniform policy)",
    "ratio": "mean importance ratio of the newest batch, clipped at 1",
    "policy_lag": "policy lag: updates between acting and learning, mean over the newest rollout (count)",
    "grad_l2": "L2 norm of the gradient before the clip",
    "grad_max": "largest size of one gradient entry before the clip",
    "grad_var": "variance of the gradient's entries before the clip",
    "learning_rate": "step size of the optimiser now",
    "share_env": "share of wall time in which environments step (0 to 1)",
    "share_act": "share of wall time in which the policy acts (0 to 1)",
    "share_learn": "share of wall time in which batches are learned (0 to 1)",
}
EPISODE_COLUMNS = ("env_steps", "seconds", "score", "length")
WINDOW = 100  # games in the moving mean that people compare


class ScoreWindow:
    """Running account of finished games: how many, the last 100 scores, the best mean."""

    def __init__(self) -> None:
        self.episodes = 0
        self.last: deque[float] = deque(maxlen=WINDOW)
        self.best_mean = -math.inf  # highest mean over a full window
        self.reached = -math.inf  # highest mean that met a target

    def add(self, scores: Iterable[float]) -> None:
        """Count finished games in order."""
        for score in scores:
            self.episodes += 1
            self.last.append(score)
            if self.full:
                self.best_mean = max(self.best_mean, self.mean)

    @property
    def mean(self) -> float:
        """Mean score of the last 100 games (of fewer at first, nan without any)."""
        return sum(self.last) / len(self.last) if self.last else math.nan

    @property
    def last_score(self) -> float:
        """Score of the newest game (nan without any)."""
        return self.last[-1] if self.last else math.nan

    @property
    def full(self) -> bool:
        """True once the mean is over 100 games."""
        return len(self.last) == WINDOW

    def meets(self, target: float) -> bool:
        """True once the mean of 100 games was at `target` when asked; games that end later do not undo it."""
        if self.full and self.mean >= target:
            self.reached = max(self.reached, self.mean)
        return self.reached >= target

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "episodes": self.episodes,
            "last": list(self.last),
            "best_mean": self.best_mean,
            "reached": self.reached,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.episodes, self.best_mean = int(state["episodes"]), float(state["best_mean"])
        self.reached = float(state["reached"])
        self.last = deque(map(float, state["last"]), maxlen=WINDOW)


class StageTimer:
    """Wall time: of the whole run, and of its stages since the newest row."""

    def __init__(self, seconds: float = 0.0, env_steps: int = 0) -> None:
        """`seconds` and `env_steps` of earlier sessions."""
        self._started = time.perf_counter() - seconds
        self.begin_row(env_steps)

    @property
    def seconds(self) -> float:
        """Wall time of training, earlier sessions included."""
        return time.perf_counter() - self._started

    @property
    def row_seconds(self) -> float:
        """Wall time since the newest row."""
        return time.perf_counter() - self._row_began

    def begin_row(self, env_steps: int) -> None:
        """A row has been written at `env_steps`."""
        self._row_began, self.row_steps = time.perf_counter(), env_steps
        self.spent = {"env": 0.0, "act": 0.0, "learn": 0.0}

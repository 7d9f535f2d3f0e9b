"""What a training run tells its caller: after each step, and at its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from a2c.envs.vector_env import Episode
from a2c.metrics.meters import WINDOW
from a2c.metrics.text import format_duration, format_score


class Progress(NamedTuple):
    """Where a run is after one training step."""

    env_steps: int  # decisions so far
    updates: int  # optimiser steps so far
    score: float  # mean score of the last 100 training episodes (points; of fewer at first, NaN without any)
    episodes: list[Episode]  # that ended in this step


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """How a run has ended."""

    run_dir: Path
    reason: str  # why it ended
    finished: bool  # its target or budget is reached; otherwise `resume` continues it
    env_steps: int  # decisions
    seconds: float  # of training, earlier sessions included
    episodes: int
    score: float  # mean score of the last 100 training episodes (points; NaN without any)
    best_score: float  # the best mean of 100 episodes (points; -infinity before there are 100)
    exit_code: int  # of the command: 0, or 128 + the number of the signal that stopped the run

    def __repr__(self) -> str:
        last = min(self.episodes, WINDOW)
        lines = {
            "reason": self.reason,
            "score": f"{format_score(self.score)} (mean of the last {last} of {self.episodes:,} episodes)",
            "length": f"{self.env_steps:,} decisions in {format_duration(self.seconds)}",
            "run_dir": str(self.run_dir),
        }
        return "\n".join(["TrainingResult(", *(f"  {name}: {text}" for name, text in lines.items()), ")"])

"""What the trainer asks of every algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from a2c.envs.vector_env import Episode


class TrainingStats(NamedTuple):
    """What one training step did: decisions, the episodes that ended, and seconds of wall time per stage.

    The stages are env, act and learn; of several processes it is their mean.
    """

    env_steps: int
    episodes: list[Episode]
    seconds: dict[str, float]


def merge_stats(stats: Sequence[TrainingStats], workers: int) -> TrainingStats:
    """The stats of `workers` processes as one: sums, and the mean over the workers of the seconds."""
    seconds = {"env": 0.0, "act": 0.0, "learn": 0.0}
    for one in stats:
        for stage, value in one.seconds.items():
            seconds[stage] += value / workers
    episodes = [episode for one in stats for episode in one.episodes]
    return TrainingStats(sum(one.env_steps for one in stats), episodes, seconds)


class Algorithm(Protocol):
    """Who collects and who learns: what the trainer asks of `a2c`, `a3c` and `ga3c` alike."""

    def start(self, new_run: bool) -> None:
        """Start environments and workers; `new_run`: the first observations feed the normaliser."""

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """After `start`: continue the episodes of `state_dict`; False if new episodes have begun."""

    def training_step(self) -> TrainingStats:
        """Collect experience and learn from it."""

    def drain(self) -> TrainingStats:
        """Finish the rollouts that have begun, before the run ends (ga3c drops them)."""

    def state_dict(self) -> dict[str, Any]:
        """The running episodes, as far as they can be saved."""

    def close(self, failed: bool = False) -> None:
        """End the environments; `failed`: some may no longer respond, so they are killed without being asked."""

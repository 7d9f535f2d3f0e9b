"""What the trainer asks of every algorithm."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from a2c.envs.vector_env import Episode


class TrainingStats(NamedTuple):
    """What a driver did since it was asked: the games that ended, and seconds of wall time per stage.

    The stages are env, act and learn; what goes on in several processes is their mean.
    """

    env_steps: int
    episodes: list[Episode]
    seconds: dict[str, float]


class Algorithm(Protocol):
    """Who plays and learns: what the trainer asks of `a2c`, `a3c` and `ga3c` alike."""

    def start(self, state: dict[str, Any] | None) -> bool:
        """New environments; True where they go on with the games of `state`, which `state_dict` gave."""

    def training_step(self) -> TrainingStats:
        """Play and learn for a while."""

    def drain(self) -> TrainingStats:
        """Finish what is under way."""

    def state_dict(self) -> dict[str, Any]:
        """The games as they stand, as far as they can be saved."""

    def close(self, failed: bool = False) -> None:
        """End the environments; `failed`: some may no longer respond, so they are killed without being asked."""

"""The outputs of every rank but the first, which alone writes and shows what all of them do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.envs.vector_env import Episode
from a2c.run.outputs import MetricsFunction, RunOutputs


class SilentOutputs(RunOutputs):
    """Counts episodes and time as `RunOutputs` does, because every rank decides when to stop. No files, no display."""

    def starting(self) -> AbstractContextManager[object]:
        """No bar."""
        return nullcontext()

    def open(self, resumed: Config | None = None, env_steps: int = 0, episodes_continue: bool = False) -> None:
        """No files, no display, no process that evaluates."""

    def write_about(self, compute: Compute) -> None:
        """No about.json."""

    def message(self, text: str, once: bool = False) -> None:
        """No line."""

    def rewind(self, env_steps: int) -> None:
        """No rows to drop."""
        self.timer.begin_row(env_steps)

    def finish(self, reason: str, learner_metrics: MetricsFunction) -> None:
        """No summary."""

    def draw_curve_when_due(self) -> None:
        """No picture."""

    def _log_episodes(self, episodes: list[Episode]) -> None:
        """No rows."""

    def _log_row(self, row: dict[str, float]) -> None:
        """No row."""

    def _attempt(self, write: Callable[[], object]) -> bool:
        return True

"""Recovery from failing workers: go back to the state in memory and start new workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from a2c.algorithms.base import Algorithm
from a2c.config.config import Config
from a2c.processes.errors import WorkerError, with_notes_of
from a2c.run.outputs import RunOutputs
from a2c.run.state import RunState


class Recovery:
    """Restarts the algorithm of a run, at most `max_worker_restarts` times in a row without progress."""

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        state: RunState,
        outputs: RunOutputs,
        stopping: Callable[[], bool],
    ) -> None:
        """`stopping()`: whether the run has been asked to stop, by agreement of all ranks."""
        self.config, self.algorithm, self.state, self.outputs = config, algorithm, state, outputs
        self.stopping = stopping
        self.restarts, self.failed_at = 0, -1  # in a row without progress; env_steps of the furthest failure

    def restart(self, error: WorkerError) -> None:
        """Go back to the state in memory and start new workers, as a resumed run does.

        Starts none if the run has been asked to stop: what stops it may have killed its workers too.
        Raises WorkerError, with the state saved, after too many attempts without progress.
        """
        while True:
            self._go_back()
            if self.stopping():
                return
            if self.restarts > self.config.max_worker_restarts:
                with suppress(OSError):
                    self.state.save_last(self.outputs)
                times = "once" if self.restarts == 1 else f"{self.restarts} times"
                failed = WorkerError(f"{error} ({times} without progress)", error.trace)
                raise with_notes_of(error, failed) from error
            try:
                continued = self.state.restart()
                break
            except (WorkerError, ValueError) as again:
                error = again if isinstance(again, WorkerError) else with_notes_of(again, WorkerError(str(again)))
        episodes = "the same episodes continue" if continued else "every environment starts a new episode"
        attempt = f"(try {self.restarts} of {self.config.max_worker_restarts})"
        self.outputs.message(f"{error}: restarted at {self.state.env_steps:,} env_steps, {episodes} {attempt}")

    def _go_back(self) -> None:
        env_steps = self.state.env_steps
        self.restarts = 1 if env_steps > self.failed_at else self.restarts + 1
        self.failed_at = max(self.failed_at, env_steps)
        self.algorithm.close(failed=True)
        self.state.restore()
        self.outputs.rewind(self.state.env_steps)

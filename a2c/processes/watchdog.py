"""A limit on every wait for a worker process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from a2c.processes.errors import WorkerError


class Watchdog:
    """A context around every request to worker processes; a thread kills them where the reply does not come.

    When it takes longer than `timeout` seconds, or a worker has died in the meantime (others may wait for what it
    held), all of `processes()` are killed: their pipes close, and what waits in the context raises. After a timeout
    the context turns that exception into a WorkerError which names `who`. Time is counted in ticks of the thread, so
    the time in which this process is suspended (Ctrl-Z, a sleeping laptop) does not count.
    """

    def __init__(
        self, timeout: float, processes: Callable[[], Sequence[BaseProcess]], who: str = "an environment"
    ) -> None:
        self.timeout, self.processes, self.who = timeout, processes, who
        self.expired = False  # a reply took too long
        self.tick = min(0.5, timeout / 4)
        self.grace = min(2.0, timeout / 2)  # in which the last message of a worker that died may still be read
        self._waiting, self._request = False, 0  # within the context; how often it was entered
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="a2c-watchdog", daemon=True)
            self._thread.start()
        self._request += 1
        self._waiting = True
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._waiting = False
        if self.expired and isinstance(error, Exception):
            raise WorkerError(f"{self.who} did not respond within {self.timeout:g} seconds") from error

    def allow_exits(self) -> None:
        """From now on a worker may end; only the timeout kills the others."""
        self.grace = math.inf

    def stop(self) -> None:
        """Let the thread end, without waiting for it."""
        self._closed.set()

    def close(self) -> None:
        """End the thread."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        request, waited = 0, 0.0
        while not self._closed.wait(self.tick):
            if not self._waiting or self._request != request:
                request, waited = self._request, 0.0
                continue
            waited += self.tick
            self.expired = waited >= self.timeout
            workers = list(self.processes()) if self.expired or waited >= self.grace else []
            if self.expired or wait([worker.sentinel for worker in workers], timeout=0):
                for worker in workers:
                    worker.kill()

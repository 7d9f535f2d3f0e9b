"""No wait on a worker process without an end. It must not import torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess


class Watchdog:
    """Kills worker processes that keep the holder of this context waiting; a thread looks on.

    Entered around every question to the workers. When the answer takes longer than `timeout`
    seconds, or a worker has died meanwhile (others may wait for what it held), all are killed:
    their pipes close and the question ends with an error. Time counts in ticks of the thread, so a
    process that was stopped (Ctrl-Z, a sleeping laptop) has not waited.
    """

    def __init__(self, timeout: float, processes: Callable[[], Sequence[BaseProcess]]) -> None:
        self.timeout, self.processes = timeout, processes
        self.expired = False  # an answer took too long
        self.tick = min(0.5, timeout / 4)
        self.grace = min(2.0, timeout / 2)  # in which the end of a worker may still explain itself
        self._asking, self._question = False, 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="a2c-watchdog", daemon=True)
            self._thread.start()
        self._question += 1
        self._asking = True
        return self

    def __exit__(self, *error: object) -> None:
        self._asking = False

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        question, waited = 0, 0.0
        while not self._over.wait(self.tick):
            if not self._asking or self._question != question:
                question, waited = self._question, 0.0
                continue
            waited += self.tick
            self.expired = waited >= self.timeout
            workers = list(self.processes()) if self.expired or waited >= self.grace else []
            if self.expired or wait([worker.sentinel for worker in workers], timeout=0):
                for worker in workers:
                    worker.kill()

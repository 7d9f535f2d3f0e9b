"""SIGINT, SIGTERM and SIGHUP as a request to stop that a loop reads between two steps."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from a2c.processes.start import SIGNALS

CALM = 2.0  # seconds after a KeyboardInterrupt in which another SIGINT raises no other: the run is closing


class StopRequest:
    """`number` of the signal that asked to stop, 0 while there was none; `by_caller`: the program that trains asked."""

    number = 0
    by_caller = False
    interrupted_at = -math.inf  # when a SIGINT last raised KeyboardInterrupt

    @property
    def name(self) -> str:
        """Name of the signal, or `the caller`."""
        return signal.Signals(self.number).name if self.number else "the caller"

    def __bool__(self) -> bool:
        return self.number != 0 or self.by_caller

    def join(self, requests: Sequence[StopRequest]) -> None:
        """Take over what asked any of several ranks to stop."""
        self.number = self.number or next((request.number for request in requests if request.number), 0)
        self.by_caller = self.by_caller or any(request.by_caller for request in requests)

    def leave(self) -> None:
        """Record that the program that trains wants to stop."""
        self.by_caller = True

    def handle(self, number: int, frame: FrameType | None) -> None:
        """A signal handler: record the first signal; raise KeyboardInterrupt at a SIGINT after any request to stop."""
        if self and number == signal.SIGINT:
            now = time.monotonic()
            if now - self.interrupted_at > CALM:
                self.interrupted_at = now
                raise KeyboardInterrupt
        self.number = self.number or number


@contextmanager
def stop_on_signals(request: StopRequest) -> Iterator[None]:
    """Record the first of `SIGNALS` in `request`; a SIGINT after any request to stop raises KeyboardInterrupt.

    Does nothing outside the main thread, which alone may handle signals in Python. SIGHUP stays ignored under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    always = (signal.SIGINT, signal.SIGTERM)
    taken = [number for number in SIGNALS if number in always or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, request.handle) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)

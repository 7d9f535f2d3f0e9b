"""SIGINT and SIGTERM as a request that a loop reads between two steps."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """`number` of the signal that asked for the end, 0 while none has."""

    number = 0

    @property
    def name(self) -> str:
        """Name of the signal."""
        return signal.Signals(self.number).name

    def __bool__(self) -> bool:
        return self.number != 0


@contextmanager
def stop_on_signals(request: StopRequest) -> Iterator[None]:
    """Note the first SIGINT or SIGTERM in `request`; a second SIGINT ends the process at once.

    Does nothing outside the main thread: Python lets it alone handle signals.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        if request and number == signal.SIGINT:
            if sys.stdout.isatty():
                os.write(1, b"\x1b[?25h")  # the live display hides the cursor
            os._exit(128 + number)
        request.number = request.number or number

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)

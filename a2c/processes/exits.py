"""How a process ends: with an exit code that says why, and with nothing left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Terminated(SystemExit):
    """SIGTERM has ended the process; `code` is its exit code."""

    code: int


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that no temporary files and no worker processes stay. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except Terminated as ended:
        exit_with(ended.code)
        raise
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _terminate(number: int, _: object) -> None:
    raise Terminated(128 + number)


def flush_output() -> None:
    """Write what stdout still holds. Where that fails, drop it, or Python would exit with status 120; OSError."""
    try:
        if sys.stdout is not None:  # it was closed at the start
            sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        raise


def flush_or_drop_output() -> None:
    """`flush_output` where it is no error that nobody reads the output."""
    with suppress(OSError):
        flush_output()


@contextmanager
def flushed_output() -> Iterator[None]:
    """At the end, and after `--help`, which ends by SystemExit: `flush_output`."""
    try:
        yield
    except SystemExit:
        flush_output()
        raise
    flush_output()


def exit_with(code: int, at_once: bool = False) -> int:
    """Return `code`; where a compute thread hangs in an environment, end the process at once: it could not exit.

    `at_once`: end it in any case. An interactive interpreter (a notebook) is never ended.
    """
    hanging = any(thread.name.startswith("a2c-compute") for thread in threading.enumerate())
    if (at_once or hanging) and not hasattr(sys, "ps1"):
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed at the start
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code

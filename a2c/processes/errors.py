"""What goes wrong in an environment, or in the process that runs it. Nothing heavy may be imported here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from a2c.processes.watchdog import Watchdog


class WorkerError(RuntimeError):
    """An environment failed, or the process that ran it died; its vector environment is of no more use.

    The message is one line; `trace` is the environment's own traceback where there is one.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


@contextmanager
def failing(*refusals: type[Exception]) -> Iterator[None]:
    """What an environment of this process raises becomes a WorkerError, but for `refusals`."""
    unchanged: tuple[type[Exception], ...] = (WorkerError, *refusals)
    try:
        yield
    except unchanged:
        raise
    except Exception as error:
        raise worker_error(error, None) from error


def worker_error(error: Exception, watchdog: Watchdog | None, who: str = "an environment") -> WorkerError:
    """What happened to `who`, in one line, and the environment's traceback if it was the environment that failed."""
    if watchdog is not None and watchdog.expired:
        return WorkerError(f"{who} gave no answer within {watchdog.timeout:g} seconds")
    if isinstance(error, EOFError | BrokenPipeError | ConnectionError):
        return WorkerError(f"the process of {who} died (killed, or out of memory)")
    trace = str(error) if "Traceback" in str(error) else ""
    what = trace.strip().splitlines()[-1] if trace else f"{type(error).__name__}: {error}"
    return WorkerError(f"{who} failed: {what}", trace)

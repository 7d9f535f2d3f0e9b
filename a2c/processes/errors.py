"""Errors of environments, worker processes and ranks: types, which mean out of memory, and who reports them.

Nothing heavy is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from a2c.processes.place import find_place

ErrorT = TypeVar("ErrorT", bound=BaseException)

REPORTED_BY = "reported by rank"  # begins the note of an error that all ranks of torchrun raise and one prints


class RankError(RuntimeError):
    """Another rank has ended or does not answer."""


class WorkerError(RuntimeError):
    """An environment, worker or predictor failed, ended or did not reply in time; its environments are unusable.

    The message is one line; `trace` is the environment's own traceback where there is one.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


def with_notes_of(cause: BaseException, error: ErrorT) -> ErrorT:
    """`error` with the notes of its `cause`."""
    for note in getattr(cause, "__notes__", ()):
        error.add_note(note)
    return error


def worker_error(error: Exception, who: str = "an environment") -> WorkerError:
    """`error` as a WorkerError: what happened to `who`, and the environment's traceback where the text holds one."""
    if isinstance(error, EOFError | BrokenPipeError | ConnectionError):
        # No words of NO_MEMORY: it may have been killed for any reason.
        return WorkerError(f"the process of {who} died, perhaps killed because memory ran out")
    trace = str(error) if "Traceback" in str(error) else ""
    what = _error_of(trace) if trace else f"{type(error).__name__}: {error}"
    return WorkerError(f"{who} failed: {' '.join(what.split())}", trace)


def _error_of(trace: str) -> str:
    """Type and message of the error that a traceback ends with; the message may have several lines."""
    lines = trace.strip().splitlines()
    frame = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=len(lines))
    begin = next((i for i in range(frame + 1, len(lines)) if not lines[i].startswith(" ")), -1)
    return "\n".join(lines[begin:])


@contextmanager
def raising_worker_error(*unchanged: type[Exception]) -> Iterator[None]:
    """Raise a WorkerError for whatever an environment raises in this context, but for the types in `unchanged`."""
    kept: tuple[type[Exception], ...] = (WorkerError, *unchanged)
    try:
        yield
    except kept:
        raise
    except Exception as error:
        raise worker_error(error) from error


# Messages of Python, numpy and torch.
NO_MEMORY = r"(?i)out of memory|(allocate|not enough) memory|\b_?(Array)?MemoryError\b|ALLOC_FAILED"


def is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether `error` says that memory of the machine or of the GPU (`torch.cuda.OutOfMemoryError`) has run out.

    A process that died may have been killed for any reason: the message of such a WorkerError does not count.
    """
    no_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return no_memory or re.search(NO_MEMORY, str(error)) is not None


def reported_elsewhere(error: Exception) -> bool:
    """Whether another rank prints `error`: the one that its note names; of what all raise, the first of a host."""
    place = find_place()
    if place.size == 1:
        return False
    if names := [note for note in getattr(error, "__notes__", ()) if note.startswith(REPORTED_BY)]:
        return bool(names[-1] != f"{REPORTED_BY} {place.rank}")
    return isinstance(error, ValueError | FloatingPointError) and place.local_rank != 0

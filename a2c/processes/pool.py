"""A pool of worker processes that run for as long as the run does, each with a pipe of its own.

Nothing is shared that a dying process could leave locked, and a pipe whose worker has ended raises EOFError.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from a2c.processes.errors import WorkerError, worker_error
from a2c.processes.start import START_TIMEOUT, WORKER_NAME, end_processes, prepare_worker, without_main, worker_context
from a2c.processes.watchdog import Watchdog

TICK = 0.5  # most seconds that one wait counts for: time while this process is suspended (Ctrl-Z) does not
DONE = "done"  # the last message of a worker whose work has returned


class WorkerPool:
    """Runs `work(*arguments, pipe)` in one process per entry of `arguments` and receives what they send.

    `work` may return a function, which is called once the worker counts as done; nobody waits for it but `close`.
    `preload`: modules that are imported once for all of them. No worker can keep the run waiting: where one dies,
    raises or sends nothing for `timeout` seconds, `receive` raises.
    """

    def __init__(
        self,
        work: Callable[..., Callable[[], None] | None],
        arguments: Sequence[tuple[Any, ...]],
        timeout: float,
        preload: Sequence[str] = (),
    ) -> None:
        self.timeout = timeout
        self.pipes: dict[Connection, int] = {}  # of the workers that are not done; their numbers
        self.waited: dict[int, float] = {}  # seconds since each worker's last message; below 0 while it may start
        self.received_at = time.perf_counter()
        self.processes: list[BaseProcess] = []
        self.watchdog = Watchdog(timeout, lambda: self.processes, "a worker")
        try:
            context: Any = multiprocessing.get_context(worker_context([work.__module__, *preload]))
            with without_main():
                for number, own in enumerate(arguments):
                    here, there = context.Pipe()
                    self.pipes[here], self.waited[number] = number, timeout - max(timeout, START_TIMEOUT)
                    name = f"{WORKER_NAME}-{number}"
                    process = context.Process(target=_run, args=(work, own, there), name=name, daemon=True)
                    process.start()
                    self.processes.append(process)
                    there.close()  # so that the worker's end is the only one
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            raise worker_error(error, "a worker") from error

    def receive(self, without: Container[int] = ()) -> list[tuple[int, Any]]:
        """The messages that have come, at most one per worker, with the workers' numbers; waits a tick for the first.

        Workers whose numbers are in `without` are skipped. Raises WorkerError for a worker that died, raised or
        did not respond in time, FloatingPointError if one computed NaN or infinity.
        """
        pipes = {pipe: number for pipe, number in self.pipes.items() if number not in without}
        ready = wait(list(pipes), TICK)
        now = time.perf_counter()
        waited, self.received_at = min(TICK, now - self.received_at), now  # also while the caller was busy elsewhere
        messages = []
        for pipe, number in pipes.items():
            if pipe not in ready:
                self.waited[number] += waited
                if self.waited[number] >= self.timeout:
                    raise WorkerError(f"a worker did not respond within {self.timeout:g} seconds")
                continue
            self.waited[number] = 0.0
            try:
                with self.watchdog:  # `recv` would wait for ever for a worker that stopped inside a message
                    message = pipe.recv()
            except (EOFError, OSError) as error:
                raise worker_error(error, "a worker") from error
            if isinstance(message, Exception):
                raise message
            if isinstance(message, str) and message == DONE:
                del self.pipes[pipe]
                pipe.close()
            else:
                messages.append((number, message))
        return messages

    def await_all(self) -> list[Any]:
        """The first message of every worker, in the order in which they came; raises as `receive` does."""
        first: dict[int, Any] = {}
        while len(first) < len(self.processes):
            first |= self.receive(without=first)
        return list(first.values())

    def reply(self, numbers: Container[int], message: Any) -> None:
        """Reply with `message` to the workers in `numbers`, which wait in `pipe.recv()` after sending theirs."""
        for pipe, number in self.pipes.items():
            if number in numbers:
                self.waited[number] = 0.0  # until now it could not send anything
                with suppress(OSError):  # it has died: `receive` will raise
                    pipe.send(message)

    @property
    def at_work(self) -> bool:
        """False once all workers are done."""
        return bool(self.pipes)

    def close(self, wait_for_done: bool = True) -> None:
        """End the processes, whatever they do; first, those that are done may have `timeout` seconds to end."""
        self.watchdog.close()
        deadline = time.monotonic() + self.timeout
        for number, process in enumerate(self.processes):
            if wait_for_done and number not in self.pipes.values():
                process.join(max(0.0, deadline - time.monotonic()))
        end_processes(self.processes)
        for pipe in self.pipes:
            pipe.close()
        self.pipes = {}


def _run(work: Callable[..., Callable[[], None] | None], arguments: tuple[Any, ...], pipe: Connection) -> None:
    """What a worker process runs."""
    prepare_worker()
    try:
        finish = work(*arguments, pipe)
        pipe.send(DONE)
        if finish is not None:
            finish()
    except (EOFError, BrokenPipeError, ConnectionError):  # the pipe is closed: the run has ended
        return
    except (FloatingPointError, WorkerError) as error:
        _send(pipe, error)
    except Exception as error:
        trace = traceback.format_exc()
        _send(pipe, WorkerError(f"a worker failed: {type(error).__name__}: {error}", trace))


def _send(pipe: Connection, error: Exception) -> None:
    with suppress(OSError):
        pipe.send(error)

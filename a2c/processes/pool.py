"""Processes that play: started together, heard through a pipe each, ended together.

Nothing is shared that a dying process could keep locked: every worker has its own pipe, and a
pipe whose worker is gone says so.
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
from a2c.processes.start import OURS, settle_in, without_main, worker_context
from a2c.processes.watchdog import Watchdog

START_TIMEOUT = 300.0  # seconds in which a worker's first message must have come
TICK = 0.5  # seconds that a wait counts at most: a process that was stopped (Ctrl-Z) has not waited
GO_ON = b"+"  # an answer to a worker that asked for none in particular
BYE = "bye"  # a worker's last message when it has done its part


class WorkerPool:
    """Runs `work(*arguments, pipe)` in a process per entry of `arguments`, and takes what they send.

    `preload`: modules that are imported once for all of them.

    None can keep the run waiting: the death, silence or exception of one raises here.
    """

    def __init__(
        self,
        work: Callable[..., None],
        arguments: Sequence[tuple[Any, ...]],
        timeout: float,
        preload: Sequence[str] = (),
    ) -> None:
        self.timeout = timeout
        self.pipes: dict[Connection, int] = {}  # of workers that are at work; their numbers
        self.silent: dict[int, float] = {}  # seconds without a message, by number
        self.heard_at = time.perf_counter()
        self.processes: list[BaseProcess] = []
        self.watchdog = Watchdog(timeout, lambda: self.processes)
        try:
            context: Any = multiprocessing.get_context(worker_context([work.__module__, *preload]))
            with without_main():
                for number, own in enumerate(arguments):
                    here, there = context.Pipe()
                    self.pipes[here], self.silent[number] = number, timeout - max(timeout, START_TIMEOUT)
                    name = f"{OURS}-{number}"
                    process = context.Process(target=_run, args=(work, own, there), name=name, daemon=True)
                    process.start()
                    self.processes.append(process)
                    there.close()  # so that the worker's end is the only one
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            raise worker_error(error, None, "a worker") from error

    def receive(self, heard: Container[int] = ()) -> list[tuple[int, Any]]:
        """The messages that are there, one per worker at most, with the workers' numbers; waits a tick for a first.

        Workers whose numbers are in `heard` are left alone.
        Raises WorkerError for a worker that died, raised or was silent for too long, FloatingPointError
        for numbers that are none.
        """
        asked = {pipe: number for pipe, number in self.pipes.items() if number not in heard}
        ready = wait(list(asked), TICK)
        now = time.perf_counter()
        waited, self.heard_at = min(TICK, now - self.heard_at), now  # also while the caller was busy elsewhere
        messages = []
        for pipe, number in asked.items():
            if pipe not in ready:
                self.silent[number] += waited
                if self.silent[number] >= self.timeout:
                    raise WorkerError(f"a worker gave no answer within {self.timeout:g} seconds")
                continue
            self.silent[number] = 0.0
            try:
                with self.watchdog:  # a worker that is stopped inside of a message would keep us waiting
                    message = pipe.recv()
            except (EOFError, OSError) as error:
                raise worker_error(error, self.watchdog, "a worker") from error
            if isinstance(message, Exception):
                raise message
            if isinstance(message, str) and message == BYE:
                del self.pipes[pipe]
                pipe.close()
            else:
                messages.append((number, message))
        return messages

    def await_all(self) -> list[Any]:
        """The first message of every worker, in the order in which they came; raises as `receive` does."""
        first: dict[int, Any] = {}
        while len(first) < len(self.processes):
            first |= self.receive(heard=first)
        return list(first.values())

    def let_go_on(self, numbers: Container[int]) -> None:
        """Answer workers that wait in `pipe.recv_bytes()` after a message."""
        for pipe, number in self.pipes.items():
            if number in numbers:
                self.silent[number] = 0.0  # it kept silent because it had to
                with suppress(OSError):  # it is gone; `receive` will say so
                    pipe.send_bytes(GO_ON)

    @property
    def at_work(self) -> bool:
        """False once all have done their part."""
        return bool(self.pipes)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self.watchdog.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.pipes = {}


def _run(work: Callable[..., None], arguments: tuple[Any, ...], pipe: Connection) -> None:
    """What a worker process runs."""
    settle_in()
    try:
        work(*arguments, pipe)
        pipe.send(BYE)
    except (EOFError, BrokenPipeError, ConnectionError):  # the run has ended
        return
    except (FloatingPointError, WorkerError) as error:
        _send(pipe, error)
    except Exception as error:
        trace = traceback.format_exc()
        _send(pipe, WorkerError(f"a worker failed: {type(error).__name__}: {error}", trace))


def _send(pipe: Connection, error: Exception) -> None:
    with suppress(OSError):
        pipe.send(error)

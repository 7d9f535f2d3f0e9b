"""Processes that play: started together, heard through a pipe each, ended together.

Nothing is shared that a dying process could keep locked: every worker has its own pipe, and a
pipe whose worker is gone says so.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch.multiprocessing  # noqa: F401  tensors in shared memory cross to a worker as such
from gymnasium.vector.utils import CloudpickleWrapper
from torch import Tensor

from a2c.config import Backend, Config, available_cores
from a2c.envs import checked_spec, make_envs, row_seeds
from a2c.games import GameEnvs, WorkerError, worker_error
from a2c.processes import OURS, allow_open_files, settle_in, without_main, worker_context
from a2c.rollout import split_edges
from a2c.watchdog import Watchdog

START_TIMEOUT = 300.0  # seconds in which a worker's first message must have come
FILES_PER_PART = 10  # that the run's process has open: pipes, sentinels, tensors in shared memory
TICK = 0.5  # seconds that a wait counts at most: a process that was stopped (Ctrl-Z) has not waited
READY = "ready"  # a worker's first message, unless it has more to say
GO_ON = b"+"  # an answer to a worker that asked for none in particular
BYE = "bye"  # a worker's last message when it has done its part


class Part(NamedTuple):
    """One worker's part of a run."""

    number: int
    config: Config  # as if the worker's environments were all there are
    spec: Any  # a CloudpickleWrapper of an EnvSpec: the caller's script may have registered it, which no worker runs
    seeds: list[int]  # one per environment
    sampling_seed: int

    def make_envs(self) -> GameEnvs:
        """The environments of this part."""
        return make_envs(self.config, self.seeds, self.spec.fn)


def parts_of(config: Config, env_steps: int) -> list[Part]:
    """Deal the environments out to the workers, of a3c in whole batches.

    A batch is that of the synchronous run (`Rollout.split`) on every machine: as many environments, and as many
    batches per rollout of all. So a3c has at most `batches_per_rollout` workers.
    """
    cores, batches, seeds = available_cores(), config.batches_per_rollout, row_seeds(config, env_steps)
    backend: Backend = "native" if config.backend == "native" else "sync"
    if config.algorithm == "a3c":
        edges = split_edges(len(seeds), batches)
        dealt = np.array_split(np.arange(batches), config.workers or min(cores, batches))
        shares = [(seeds[edges[own[0]] : edges[own[-1] + 1]], len(own)) for own in dealt]
    else:  # players of ga3c learn nothing: its trainer cuts the batches
        dealt = np.array_split(seeds, min(len(seeds), config.workers or 2 * cores))
        shares = [(own.tolist(), 1) for own in dealt]
    parts, spec = [], CloudpickleWrapper(checked_spec(config))  # type: ignore[arg-type]
    for number, (own, learned) in enumerate(shares):
        mine = replace(config, backend=backend, threads=1, workers=0, cuda=False)
        mine = replace(mine, num_envs=len(own), batches_per_rollout=learned)
        parts.append(Part(number, mine, spec, own, config.seed + env_steps + 7919 * number))
    return parts


def allow_parts(config: Config, parts: Sequence[Part]) -> None:
    """Raise the limit of open files as far as `parts` need it; ValueError where the system refuses."""
    rule = f"workers and num_envs must leave files to open, got {len(parts)} and {config.num_envs}"
    allow_open_files(FILES_PER_PART * len(parts), rule, "fewer workers")


def columns_per_batch(config: Config) -> int:
    """Environments whose windows make one batch."""
    return max(1, round(config.num_envs / config.batches_per_rollout))


def share(tensors: Iterable[Tensor]) -> None:
    """Move tensors to shared memory, in place; WorkerError where there is none left."""
    try:
        for tensor in tensors:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        raise WorkerError(f"no shared memory for the workers: {' '.join(str(error).split())[:200]}") from error


class Workers:
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

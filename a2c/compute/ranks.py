"""Several processes that learn as one: the ranks that torchrun starts, each with a share of the environments.

Every rank has the same parameters. Each collects from environments of its own and computes the part that these have
in the gradient; the sum over all ranks, one all-reduce per optimiser step, is what every rank then applies.
"""

from __future__ import annotations

import io
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from a2c.config.config import Config
from a2c.processes.errors import REPORTED_BY
from a2c.processes.start import stop_with_parent

T = TypeVar("T")
PATIENCE = timedelta(minutes=10)  # that one rank waits for the others, which may start environments or wait for a disk
ROLL_CALL = 2.0  # seconds in which every rank that still runs has noticed that another has not


class RankError(ConnectionError):
    """Another rank has ended or does not answer."""


class Place(NamedTuple):
    """Where a process stands among those that learn together, and among those of its host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


class Ranks:
    """The processes that learn together, seen from one of them; here, one that is alone."""

    def __init__(self, place: Place | None = None) -> None:
        self.rank, self.size, self.local_rank, self.local_size = place or Place()

    def rows(self, num_envs: int) -> range:
        """The environments, of `num_envs` in all, that belong to this rank: `n` with `n % size == rank`.

        Of any `size` neighbouring rows each rank has one, so that every minibatch of a rollout has some of each.
        """
        return range(self.rank, num_envs, self.size)

    def columns(self, low: int, high: int) -> tuple[int, int]:
        """Where the environments `low <= n < high` begin and end among those of this rank."""
        return len(self.rows(low)), len(self.rows(high))

    def own(self, decisions: np.ndarray, num_envs: int) -> np.ndarray:
        """Those of `decisions` (`t * num_envs + n`) that environments of this rank took, as numbered here alone."""
        t, n = np.divmod(decisions, num_envs)
        mine = n % self.size == self.rank
        numbers: np.ndarray = t[mine] * len(self.rows(num_envs)) + n[mine] // self.size
        return numbers

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up `tensor` over all ranks, in place."""
        return tensor

    def gather(self, item: T) -> list[T]:
        """What every rank has given, in order of the ranks."""
        return [item]

    def join_columns(self, tensor: Tensor) -> Tensor:
        """`[..., N]` of every rank's environments, in the order of all environments."""
        return tensor

    def gather_on_first(self, item: T) -> list[T]:
        """`gather`, on rank 0, with tensors on the CPU; an empty list on the others."""
        return [item]

    def first(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0; every rank returns its result or raises its error."""
        return function()

    def all(self, function: Callable[[], T]) -> list[T]:
        """Call `function`, in which no rank waits for another, on every rank; all results, in order of the ranks.

        Where it fails on a rank, every rank raises the error of the first of these.
        """
        return [function()]

    def close(self) -> None:
        """Leave the other ranks."""


class TorchRanks(Ranks):
    """Ranks that torchrun has started, connected by gloo, and for tensors on a GPU by NCCL.

    Each method raises RankError, which names the lost ranks, where one has ended. PATIENCE bounds every wait.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        shared, *_ = next(iter(rendezvous("env://", timeout=PATIENCE)))
        name = _meet(shared, self.rank, self.size)
        self.store = dist.PrefixStore(name, shared)  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.size, timeout=PATIENCE)

    def sum(self, tensor: Tensor) -> Tensor:
        with self._naming_lost_ranks():
            dist.all_reduce(tensor)
        return tensor

    def gather(self, item: T) -> list[T]:
        items: list[Any] = [None] * self.size
        with self._naming_lost_ranks():
            dist.all_gather_object(items, item)
        return items

    def join_columns(self, tensor: Tensor) -> Tensor:
        parts = [part.to(tensor.device) for part in self.gather(tensor.cpu())]
        joined = tensor.new_empty((*tensor.shape[:-1], sum(part.shape[-1] for part in parts)))
        for rank, part in enumerate(parts):
            joined[..., rank :: self.size] = part
        return joined

    def gather_on_first(self, item: T) -> list[T]:
        content = io.BytesIO()
        torch.save(item, content)
        items: list[Any] = [None] * self.size if self.rank == 0 else []
        with self._naming_lost_ranks():
            dist.gather_object(content.getvalue(), items or None)
        return [torch.load(io.BytesIO(one), map_location="cpu", weights_only=False) for one in items]

    def first(self, function: Callable[[], T]) -> T:
        outcome: list[Any] = [_outcome(function) if self.rank == 0 else None]
        with self._naming_lost_ranks():
            dist.broadcast_object_list(outcome)
        result: T = self._result(outcome)[0]
        return result

    def all(self, function: Callable[[], T]) -> list[T]:
        mine = _outcome(function)
        outcomes: list[Any] = self.gather(mine)
        outcomes[self.rank] = mine  # its error has a traceback
        return self._result(outcomes)

    def _result(self, outcomes: list[Any]) -> list[Any]:
        """The results in `outcomes`; raises the first error, with a note that another rank reports it."""
        for rank, (error, _) in enumerate(outcomes):
            if error is not None:
                if rank != self.rank:
                    error.add_note(f"{REPORTED_BY} {rank}")
                raise error
        return [result for _, result in outcomes]

    @contextmanager
    def _naming_lost_ranks(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(f"{self._lost(error)}; the newest checkpoint is kept") from error

    def _lost(self, error: Exception) -> str:
        """Which ranks no longer run: all others notice the broken connection as this one has."""
        lost = list(range(self.size))
        with suppress(RuntimeError):  # the store has ended, too
            self.store.set(f"here/{self.rank}", "")
            end = time.monotonic() + ROLL_CALL
            while lost and time.monotonic() < end:
                time.sleep(0.05)
                lost = [rank for rank in lost if not self.store.check([f"here/{rank}"])]
        names = ", ".join(str(rank) for rank in lost if rank != self.rank)
        return f"rank {names} has ended or does not answer" if names else f"the ranks lost their connection: {error}"

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(store: Any, rank: int, size: int) -> str:
    """A name for the ranks that are here: torchrun's store may still hold what they wrote before they were restarted.

    Rank 0 chooses it, and answers every rank under a token that nobody has used before.
    """
    if rank > 0:
        token = uuid.uuid4().hex
        store.set(f"here/{rank}", token)
        given: str = store.get(f"name/{token}").decode()
        store.set(f"{given}/{rank}", "")
        return given
    name, end = uuid.uuid4().hex, time.monotonic() + PATIENCE.total_seconds()
    while missing := [other for other in range(1, size) if not store.check([f"{name}/{other}"])]:
        for other in missing:
            if store.check([f"here/{other}"]):
                store.set(f"name/{store.get(f'here/{other}').decode()}", name)
        if time.monotonic() > end:
            raise RankError(f"rank {', '.join(map(str, missing))} has not started")
        time.sleep(0.02)
    return name


def _outcome(function: Callable[[], Any]) -> tuple[Exception | None, Any]:
    try:
        return None, function()
    except Exception as error:
        return error, None


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """What torchrun has written into the environment; alone where it has not started this process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in environ or not all(name in environ for name in names):
        return Place()
    return Place(*(int(environ[name]) for name in names))


def join_ranks(config: Config) -> Ranks:
    """The ranks of this run; waits for all of them. ValueError where they cannot share `config`."""
    place = find_place()
    if place.size == 1:
        return Ranks(place)
    check_shareable(config, place.size)
    stop_with_parent()
    return TorchRanks(place)


def check_shareable(config: Config, size: int) -> None:
    """ValueError where `size` ranks cannot share a run of `config`."""
    if config.algorithm != "a2c":
        raise ValueError(f"algorithm must be a2c with more than one rank, got {config.algorithm}")
    if config.sliding_batch:
        raise ValueError(f"sliding_batch must be 0 with more than one rank, got {config.sliding_batch}")
    if config.cuda_graphs:
        raise ValueError("cuda_graphs must be off with more than one rank, got True")
    if config.num_envs < size:
        raise ValueError(f"num_envs must be at least the number of ranks, {size}, got {config.num_envs}")

"""The ranks that torchrun starts: how they meet, what they exchange, and how the loss of one is noticed."""

from __future__ import annotations

import io
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from a2c.compute.ranks import Ranks, check_shareable
from a2c.config.config import Config
from a2c.processes.errors import REPORTED_BY, RankError
from a2c.processes.place import Place, find_place
from a2c.processes.start import stop_with_parent

T = TypeVar("T")
PATIENCE = 600.0  # seconds, at least, that a rank waits for the others, which may start environments or wait for a disk
HEARTBEAT = 0.5  # seconds between two signs of life of a rank
SETTLE = 0.2  # seconds between the last call of a rank and the end of its connection
ROLL_CALL = 2.5  # seconds without a sign of life after which a rank counts as lost


class TorchRanks(Ranks):
    """Ranks that torchrun has started, connected by gloo, and for tensors on a GPU by NCCL.

    Each method raises RankError, which names the lost ranks, if one has ended, or has let the others wait for
    `patience` seconds. A sum on a GPU only begins NCCL's work: a rank lost then is noticed at the next call of gloo.
    """

    def __init__(self, place: Place, cuda: bool = False, patience: float = PATIENCE) -> None:
        from torch.distributed.rendezvous import rendezvous  # a torch that is built without it can run one process

        super().__init__(place)
        self.closed, timeout = threading.Event(), timedelta(seconds=patience)
        shared, *_ = next(iter(rendezvous("env://", timeout=timeout)))
        name = _meet(shared, self.rank, self.size, patience)
        self.store = dist.PrefixStore(name, shared)  # type: ignore[attr-defined]
        self.heart = threading.Thread(target=self._beat, daemon=True)
        self.heart.start()
        backend = "cpu:gloo,cuda:nccl" if cuda and torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.size, timeout=timeout)

    def _beat(self) -> None:
        """Give signs of life, also while the rank's main thread works or waits."""
        with suppress(RuntimeError):  # the store has ended: torchrun ends this process, too
            while not self.closed.wait(HEARTBEAT):
                self.store.add(f"beats/{self.rank}", 1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self._naming_lost_ranks():
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, item: T) -> list[T]:
        items: list[Any] = [None] * self.size
        with self._naming_lost_ranks():
            dist.all_gather_object(items, item)
        return items

    def join_columns(self, tensor: Tensor) -> Tensor:
        parts = [part.to(tensor.device) for part in self.all_gather(tensor.cpu())]
        joined = tensor.new_empty((*tensor.shape[:-1], sum(part.shape[-1] for part in parts)))
        for rank, part in enumerate(parts):
            joined[..., rank :: self.size] = part
        return joined

    def gather(self, item: T) -> list[T]:
        content = io.BytesIO()
        torch.save(item, content)
        items: list[Any] = [None] * self.size if self.rank == 0 else []
        with self._naming_lost_ranks():
            dist.gather_object(content.getvalue(), items or None)
        return [torch.load(io.BytesIO(one), map_location="cpu", weights_only=False) for one in items]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        with self._naming_lost_ranks():
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def on_rank_0(self, function: Callable[[], T]) -> T:
        outcome: list[Any] = [_outcome(function) if self.rank == 0 else None]
        with self._naming_lost_ranks():
            dist.broadcast_object_list(outcome)
        result: T = self._result(outcome)[0]
        return result

    def on_every_rank(self, function: Callable[[], T]) -> list[T]:
        mine = _outcome(function)
        outcomes: list[Any] = self.all_gather(mine)
        outcomes[self.rank] = mine  # its error has a traceback
        return self._result(outcomes)

    def _result(self, outcomes: list[Any]) -> list[Any]:
        """The results in `outcomes`; raises the first error, with a note of the rank that reports it."""
        for rank, (error, _) in enumerate(outcomes):
            if error is not None:
                error.add_note(f"{REPORTED_BY} {rank}")
                raise error
        return [result for _, result in outcomes]

    @contextmanager
    def _naming_lost_ranks(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> RankError:
        """What to raise: the first rank that knows which are lost tells the others, and reports it."""
        with suppress(RuntimeError):  # the store has ended, too
            before = self._beats()
            time.sleep(ROLL_CALL)
            beats = zip(before, self._beats(), strict=True)
            names = ", ".join(str(rank) for rank, (then, now) in enumerate(beats) if now == then)
            if names:
                told = self.store.compare_set("lost", "", f"{self.rank}:{names}").decode()
                reporter, _, names = told.partition(":")
                lost = RankError(f"lost rank {names}, which ended or did not answer; the last checkpoint is kept")
                lost.add_note(f"{REPORTED_BY} {reporter}")
                return lost
        return RankError(f"the ranks have lost their connection ({error}); the last checkpoint is kept")

    def _beats(self) -> list[int]:
        return [self.store.add(f"beats/{rank}", 0) for rank in range(self.size)]

    def close(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            self.heart.join(ROLL_CALL)
            # A thread of gloo drops the tensors of its last call after the call has returned, and needs the GIL
            # for that. In an interpreter that exits it cannot have it: the process would abort.
            time.sleep(SETTLE)
            dist.destroy_process_group()


def _meet(store: Any, rank: int, size: int, patience: float) -> str:
    """A name for the ranks that are here: torchrun's store may still hold what they wrote before they were restarted.

    Rank 0 chooses it, and answers every rank under a token that nobody has used before.
    """
    if rank > 0:
        token = uuid.uuid4().hex
        store.set(f"here/{rank}", token)
        given: str = store.get(f"name/{token}").decode()
        store.set(f"{given}/{rank}", "")
        return given
    name, end = uuid.uuid4().hex, time.monotonic() + patience
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


def join_ranks(config: Config) -> Ranks:
    """The ranks of this run; waits for all of them. ValueError if they cannot share `config`."""
    place = find_place()
    if place.size == 1:
        return Ranks(place)
    check_shareable(config, place.size)
    stop_with_parent()
    return TorchRanks(place, config.cuda, max(PATIENCE, 2 * config.env_timeout))

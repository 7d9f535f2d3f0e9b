"""Several processes that learn as one: the ranks that torchrun starts, each with a share of the environments.

Every rank has the same parameters. Each collects from environments of its own and computes the part that these have
in the gradient; the sum over all ranks, one all-reduce per optimiser step, is what every rank then applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
from torch import Tensor

from a2c.config.config import Config
from a2c.processes.place import Place

T = TypeVar("T")


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

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up `tensor` over all ranks, in place."""
        return tensor

    def all_gather(self, item: T) -> list[T]:
        """What every rank has given, in order of the ranks."""
        return [item]

    def join_columns(self, tensor: Tensor) -> Tensor:
        """`[..., N]` of every rank's environments, in the order of all environments."""
        return tensor

    def gather(self, item: T) -> list[T]:
        """The items of all ranks, with tensors on the CPU, on rank 0; an empty list on the others."""
        return [item]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give `tensors` the values that they have on rank 0."""

    def check_same(self, what: str) -> None:
        """ValueError if `what` differs between the ranks."""
        if len(found := set(self.all_gather(what))) > 1:
            raise ValueError(f"cuda and precision must be the same on every rank, got {', '.join(sorted(found))}")

    def on_rank_0(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0; every rank returns its result or raises its error."""
        return function()

    def on_every_rank(self, function: Callable[[], T]) -> list[T]:
        """Call `function`, in which no rank waits for another, on every rank; all results, in order of the ranks.

        Where it fails on a rank, every rank raises the error of the first of these.
        """
        return [function()]

    def close(self) -> None:
        """Leave the other ranks."""


def check_shareable(config: Config, size: int) -> None:
    """ValueError if `size` ranks cannot share a run of `config`."""
    if config.algorithm != "a2c":
        raise ValueError(f"algorithm must be a2c with more than one rank, got {config.algorithm}")
    if config.sliding_batch:
        raise ValueError(f"sliding_batch must be 0 with more than one rank, got {config.sliding_batch}")
    if config.num_envs < size:
        raise ValueError(f"num_envs must be at least the number of ranks, {size}, got {config.num_envs}")

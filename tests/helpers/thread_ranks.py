"""Ranks that are threads of one process, for the mathematics of what torchrun starts as processes."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from a2c.compute.torch_ranks import TorchRanks, _outcome
from a2c.processes.place import Place


class ThreadRanks(TorchRanks):
    """Everything of `TorchRanks` but its connection: what the ranks exchange lies in a list that they share."""

    def __init__(self, place, board, barrier):
        self.rank, self.size, self.local_rank, self.local_size = place
        self.board, self.barrier = board, barrier

    def all_gather(self, item):
        self.board[self.rank] = pickle.dumps(item)
        self.barrier.wait(20)
        items = [pickle.loads(one) for one in self.board]
        self.barrier.wait(20)
        return items

    def broadcast(self, tensors):
        tensors = list(tensors)
        for mine, first in zip(tensors, self.all_gather(tensors)[0], strict=True):
            mine.copy_(first)

    def on_rank_0(self, function):
        return self._result([self.all_gather(_outcome(function) if self.rank == 0 else None)[0]])[0]

    def all_reduce(self, tensor):
        return tensor.copy_(torch.stack(self.all_gather(tensor.clone())).sum(0))


def on_ranks(size, function):
    """`function(ranks)` on `size` ranks at once; the results in order."""
    board, barrier = [None] * size, threading.Barrier(size)

    def run(rank):
        try:
            return function(ThreadRanks(Place(rank, size, rank, size), board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))

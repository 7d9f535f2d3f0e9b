"""One network that answers many processes: questions on desks in shared memory, answers beside them.

GA3C's predictor (Babaeizadeh et al., 2017, section 4). `RemoteNetwork` is its other end, in the process that asks.
"""

from __future__ import annotations

import copy
import struct
import threading
import traceback
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from a2c.algorithms.worker_tasks import share
from a2c.compute.compute import Compute, use_one_thread
from a2c.compute.replica import sync_replica
from a2c.envs.single import Spaces
from a2c.learner import Learner
from a2c.policy import step
from a2c.processes.errors import WorkerError

QUESTION = b"?"  # the desk is ready to be read
VERSION = struct.Struct("q")  # an answer: updates that the network has seen


class Desk(NamedTuple):
    """Questions and answers in shared memory. While a player waits, its rows belong to the predictor."""

    obs: Tensor  # [N, ...], a row per environment of the player
    memory: Tensor  # [N, M] before and, in the answer, after the decision
    logits: Tensor  # [N, A]
    values: Tensor  # [N, 1]


def make_desk(rows: int, spaces: Spaces, memory_size: int) -> Desk:
    """A desk in shared memory for a player with so many environments."""
    obs = torch.from_numpy(np.zeros((rows, *spaces.obs_shape), spaces.obs_dtype))
    rest = (torch.zeros(rows, width) for width in (memory_size, spaces.n_actions, 1))
    desk = Desk(obs, *rest)
    share(desk)
    return desk


class Predictor:
    """A thread that answers the players' questions, all that are there in one pass of the network."""

    def __init__(self, learner: Learner, desks: dict[Connection, Desk], compute: Compute) -> None:
        self.learner, self.desks, self.compute = learner, dict(desks), compute
        self.net = copy.deepcopy(learner.twin)  # the learner moves its own while this one answers
        self.version = learner.updates
        self._lock = threading.Lock()  # held while the parameters are read or replaced
        self._over = False
        self._trouble: WorkerError | None = None
        self._thread = threading.Thread(target=self._answer, name="a2c-predictor", daemon=True)
        self._thread.start()

    def sync(self) -> None:
        """Take over the parameters and statistics that the learner has now."""
        with self._lock:
            sync_replica(self.net, self.learner.net)
            self.version = self.learner.updates

    def check(self) -> None:
        """Raise WorkerError where the thread has failed (a GPU that is full, say)."""
        if self._trouble is not None:
            raise self._trouble

    def close(self) -> None:
        """End the thread."""
        self._over = True
        self._thread.join()
        for pipe in self.desks:
            pipe.close()

    @torch.no_grad()
    def _answer(self) -> None:
        use_one_thread()
        try:
            while not self._over:
                questions = []
                for pipe in wait(list(self.desks), timeout=0.1):
                    assert isinstance(pipe, Connection)
                    try:
                        pipe.recv_bytes()
                        questions.append(pipe)
                    except (EOFError, OSError):  # its player is gone; the trainer's thread will notice
                        del self.desks[pipe]
                if questions:
                    self._predict(questions)
        except Exception as error:
            self._trouble = WorkerError(
                f"the predictor failed: {type(error).__name__}: {error}", traceback.format_exc()
            )

    def _predict(self, questions: list[Connection]) -> None:
        desks = [self.desks[pipe] for pipe in questions]
        device = self.compute.device
        obs = torch.cat([desk.obs for desk in desks]).to(device)
        memory = torch.cat([desk.memory for desk in desks]).to(device)
        going_on = torch.zeros(len(obs), dtype=torch.bool, device=device)  # players empty their memories themselves
        with self._lock:
            logits, values, memory = step(self.net, obs, memory, going_on)
            version = self.version
        sizes = [len(desk.obs) for desk in desks]
        parts = (torch.split(tensor.float().cpu(), sizes) for tensor in (logits, values, memory))
        for pipe, desk, logits, values, memory in zip(questions, desks, *parts, strict=True):
            desk.logits.copy_(logits)
            desk.values.copy_(values)
            desk.memory.copy_(memory)
            try:
                pipe.send_bytes(VERSION.pack(version))
            except OSError:
                del self.desks[pipe]


class RemoteNetwork:
    """The predictor as a player sees it: a network like any other, whose arithmetic is done elsewhere."""

    def __init__(self, desk: Desk, pipe: Connection) -> None:
        self.desk, self.pipe = desk, pipe
        self.memory_size = desk.memory.shape[1]
        self.versions: list[int] = []  # updates that the network had seen, per answer

    def __call__(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`obs [B, ...]` to `(logits [B, A], values [B, 1])`."""
        return self.step(obs, torch.zeros(len(obs), 0))[:2]

    def step(self, obs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`obs [B, ...]` and `memory [B, M]` to `(logits [B, A], values [B, 1], memory [B, M])`."""
        self.desk.obs.copy_(obs)
        self.desk.memory.copy_(memory)
        self.pipe.send_bytes(QUESTION)
        self.versions += VERSION.unpack(self.pipe.recv_bytes())
        return self.desk.logits.clone(), self.desk.values.clone(), self.desk.memory.clone()

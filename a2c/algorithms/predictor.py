"""One network that serves many processes: requests and replies in buffers of shared memory.

GA3C's predictor (Babaeizadeh et al., 2017, section 4). `RemoteNetwork` is its client, in an actor's process.
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

from a2c.algorithms.worker_tasks import move_to_shared_memory
from a2c.compute.compute import Compute, use_one_thread
from a2c.compute.replica import sync_replica
from a2c.envs.single import Spaces
from a2c.learner import Learner
from a2c.policy import step
from a2c.processes.errors import WorkerError

REQUEST = b"?"  # the buffers are ready to be read
VERSION = struct.Struct("q")  # a reply: updates that the network has seen


class InferenceBuffers(NamedTuple):
    """Request and reply in shared memory. While an actor waits, only the predictor writes to them."""

    obs: Tensor  # [N, ...], a row per environment of the actor
    rnn_state: Tensor  # [N, H] before and, in the reply, after the decision
    logits: Tensor  # [N, A]
    values: Tensor  # [N, 1]


def make_buffers(rows: int, spaces: Spaces, rnn_state_size: int) -> InferenceBuffers:
    """Buffers in shared memory for an actor with `rows` environments."""
    obs = torch.from_numpy(np.zeros((rows, *spaces.obs_shape), spaces.obs_dtype))
    rest = (torch.zeros(rows, width) for width in (rnn_state_size, spaces.n_actions, 1))
    buffers = InferenceBuffers(obs, *rest)
    move_to_shared_memory(buffers)
    return buffers


class Predictor:
    """A thread that serves the actors' requests: all that have arrived, in one forward pass."""

    def __init__(self, learner: Learner, all_buffers: dict[Connection, InferenceBuffers], compute: Compute) -> None:
        self.learner, self.all_buffers, self.compute = learner, dict(all_buffers), compute
        self.net = copy.deepcopy(learner.replica)  # the learner updates its own meanwhile
        self.version = learner.updates
        self._lock = threading.Lock()  # held while the parameters are read or replaced
        self._closed = False
        self._error: WorkerError | None = None
        self._thread = threading.Thread(target=self._serve, name="a2c-predictor", daemon=True)
        self._thread.start()

    def sync(self) -> None:
        """Take over the parameters and statistics that the learner has now."""
        with self._lock:
            sync_replica(self.net, self.learner.net)
            self.version = self.learner.updates

    def check(self) -> None:
        """Raise WorkerError where the thread has failed, for example on a GPU without free memory."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._thread.join()
        for pipe in self.all_buffers:
            pipe.close()

    @torch.no_grad()
    def _serve(self) -> None:
        use_one_thread()
        try:
            while not self._closed:
                requests = []
                for pipe in wait(list(self.all_buffers), timeout=0.1):
                    assert isinstance(pipe, Connection)
                    try:
                        pipe.recv_bytes()
                        requests.append(pipe)
                    except (EOFError, OSError):  # its actor has ended; the trainer's thread will notice
                        del self.all_buffers[pipe]
                if requests:
                    self._predict(requests)
        except Exception as error:
            self._error = WorkerError(f"the predictor failed: {type(error).__name__}: {error}", traceback.format_exc())

    def _predict(self, requests: list[Connection]) -> None:
        all_buffers = [self.all_buffers[pipe] for pipe in requests]
        device = self.compute.device
        obs = torch.cat([buffers.obs for buffers in all_buffers]).to(device)
        rnn_state = torch.cat([buffers.rnn_state for buffers in all_buffers]).to(device)
        no_starts = torch.zeros(len(obs), dtype=torch.bool, device=device)  # actors reset their states
        with self._lock:
            logits, values, rnn_state = step(self.net, obs, rnn_state, no_starts)
            version = self.version
        sizes = [len(buffers.obs) for buffers in all_buffers]
        parts = (torch.split(tensor.float().cpu(), sizes) for tensor in (logits, values, rnn_state))
        for pipe, buffers, logits, values, rnn_state in zip(requests, all_buffers, *parts, strict=True):
            buffers.logits.copy_(logits)
            buffers.values.copy_(values)
            buffers.rnn_state.copy_(rnn_state)
            try:
                pipe.send_bytes(VERSION.pack(version))
            except OSError:
                del self.all_buffers[pipe]


class RemoteNetwork:
    """The predictor as an actor sees it: called like a network, computed in the run's process."""

    def __init__(self, buffers: InferenceBuffers, pipe: Connection) -> None:
        self.buffers, self.pipe = buffers, pipe
        self.rnn_state_size = buffers.rnn_state.shape[1]
        self.versions: list[int] = []  # updates that the network had seen, per reply

    def __call__(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`obs [B, ...]` to `(logits [B, A], values [B, 1])`."""
        return self.step(obs, torch.zeros(len(obs), 0))[:2]

    def step(self, obs: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`obs [B, ...]` and `rnn_state [B, H]` to `(logits [B, A], values [B, 1], rnn_state [B, H])`."""
        self.buffers.obs.copy_(obs)
        self.buffers.rnn_state.copy_(rnn_state)
        self.pipe.send_bytes(REQUEST)
        self.versions += VERSION.unpack(self.pipe.recv_bytes())
        return self.buffers.logits.clone(), self.buffers.values.clone(), self.buffers.rnn_state.clone()

    def mean_version(self) -> float:
        """Updates that the network had seen, mean over the replies since the last call."""
        mean = sum(self.versions) / len(self.versions)
        self.versions.clear()
        return mean

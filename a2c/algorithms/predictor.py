"""One network that serves many processes: requests and replies in buffers of shared memory.

GA3C's predictor (Babaeizadeh et al., 2017, section 4). `RemoteNetwork` is its client, in an actor's process.
"""

from __future__ import annotations

import copy
import struct
import threading
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from a2c.algorithms.worker_tasks import move_to_shared_memory
from a2c.compute.compute import Compute, prepare_thread
from a2c.compute.replica import sync_replica
from a2c.compute.staging import to_device
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


class ShownObs:
    """What an actor has asked about in its rollout, on the device that learns from it later: each crosses once."""

    def __init__(self, steps: int, like: Tensor, device: torch.device) -> None:
        self.obs = torch.empty((steps + 1, *like.shape), dtype=like.dtype, device=device)  # [T + 1, n, ...]
        self.requests = 0

    def cross(self, obs: Tensor) -> Tensor:
        """`obs [n, ...]` of the next request, on the device."""
        t = self.requests % (len(self.obs) - 1)
        begins_rollout = t == 0 and self.requests > 0  # then it came with the rollout before, as the last entry
        self.requests += 1
        return self.obs[t].copy_(self.obs[-1] if begins_rollout else to_device(obs, self.obs.device))

    def rollout(self, next_obs: Tensor) -> tuple[Tensor, Tensor]:
        """The observations `[T, n, ...]` of a rollout that has come and those after it, until its actor goes on."""
        return self.obs[:-1], self.obs[-1].copy_(to_device(next_obs, self.obs.device))


class Predictor:
    """A thread that serves the actors' requests: all that have arrived, in one forward pass.

    On a GPU it has a stream of its own, so that a forward pass does not wait for an update; `sync` orders the two.
    """

    def __init__(self, learner: Learner, all_buffers: dict[Connection, InferenceBuffers], compute: Compute) -> None:
        self.learner, self.all_buffers, self.compute = learner, dict(all_buffers), compute
        self.net = copy.deepcopy(learner.replica)  # the learner updates its own meanwhile
        self.version = learner.updates
        steps, device = learner.config.rollout_steps, compute.device
        self.shown = {pipe: ShownObs(steps, buffers.obs, device) for pipe, buffers in all_buffers.items()}
        self.actors = list(all_buffers)  # their pipes, by the actors' numbers
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._join_streams()
        self._lock = threading.Lock()  # held while the parameters are read or replaced
        self._closed = False
        self._error: WorkerError | None = None
        self._thread = threading.Thread(target=self._serve, name="a2c-predictor", daemon=True)
        self._thread.start()

    def sync(self) -> None:
        """Take over the parameters and statistics that the learner has now."""
        with self._lock:
            if self.stream is not None:  # passes that read the parameters as they were
                torch.cuda.current_stream(self.compute.device).wait_stream(self.stream)
            sync_replica(self.net, self.learner.net)
            self.version = self.learner.updates
            self._join_streams()

    def _join_streams(self) -> None:
        """What the predictor does from now on comes after what the caller's stream has been given until now."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.compute.device))

    def rollout_obs(self, number: int, next_obs: Tensor) -> tuple[Tensor, Tensor]:
        """`obs [T, n, ...]` and `next_obs [n, ...]` of actor `number`, on the device; see `ShownObs.rollout`."""
        return self.shown[self.actors[number]].rollout(next_obs)

    def check(self) -> None:
        """Raise WorkerError if the thread has failed, for example on a GPU without free memory."""
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
        prepare_thread(self.compute.device)
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
        with torch.cuda.stream(self.stream):  # no other one where it is None
            with self._lock:
                shown = zip(requests, all_buffers, strict=True)
                obs = torch.cat([self.shown[pipe].cross(buffers.obs) for pipe, buffers in shown])
                rnn_state = to_device(torch.cat([buffers.rnn_state for buffers in all_buffers]), self.compute.device)
                no_starts = torch.zeros(len(obs), dtype=torch.bool, device=obs.device)  # actors reset their states
                outputs = step(self.net, obs, rnn_state, no_starts)
                version = self.version
            joined = torch.cat([output.float() for output in outputs], dim=1).cpu()  # the one wait
        rows = torch.split(joined, [len(buffers.obs) for buffers in all_buffers])
        for pipe, buffers, own in zip(requests, all_buffers, rows, strict=True):
            widths = [buffers.logits.shape[1], 1, buffers.rnn_state.shape[1]]
            logits, values, rnn_state = torch.split(own, widths, dim=1)
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

"""GA3C: processes that only play, one predictor that answers all of them, one queue that a trainer learns from.

Babaeizadeh et al. (2017), "Reinforcement learning through asynchronous advantage actor-critic on a GPU",
sections 4 and 5. The network stands in the run's process alone, on the GPU if there is one. Between acting
and learning it moves on: the *policy lag*, which is measured (metric `lag`) and met with clipped
importance ratios and with log(pi + epsilon).
"""

from __future__ import annotations

import time
from dataclasses import fields
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from a2c.algorithms.base import TrainingStats
from a2c.algorithms.predictor import InferenceBuffers, Predictor, RemoteNetwork, make_buffers
from a2c.algorithms.worker_tasks import WorkerTask, allow_workers, columns_per_batch, make_tasks
from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.envs.single import Spaces
from a2c.envs.vector_env import Episode
from a2c.learner import Learner
from a2c.processes.pool import WorkerPool
from a2c.rollout import Rollout


class Played(NamedTuple):
    """What a player sends: its first observations, then rollouts (as arrays: a copy, no shared memory)."""

    first_obs: Any | None
    rollout: dict[str, Any]
    episodes: list[Episode]
    seconds: dict[str, float]


class GA3C:
    """The driver of `--algorithm ga3c`: this thread is the trainer, a second one the predictor."""

    def __init__(self, config: Config, spaces: Spaces, learner: Learner, compute: Compute) -> None:
        self.config, self.spaces, self.learner, self.compute = config, spaces, learner, compute
        self.columns = columns_per_batch(config)
        self.queue: list[Rollout] = []
        self.waiting: list[int] = []  # players whose rollouts are in the queue
        self.workers: WorkerPool | None = None
        self.predictor: Predictor | None = None

    def start(self, new_run: bool) -> None:
        """Start actors and predictor."""
        config, learner = self.config, self.learner
        tasks = make_tasks(config, learner.env_steps)
        allow_workers(config, tasks)
        all_buffers, arguments = {}, []
        for task in tasks:
            buffers = make_buffers(len(task.seeds), self.spaces, getattr(learner.net, "rnn_state_size", 0))
            here, there = Pipe()
            all_buffers[here] = buffers
            arguments.append((task, buffers, there))
        self.workers = WorkerPool(run_actor, arguments, config.env_timeout)
        for _, _, there in arguments:
            there.close()  # so that the player's end is the only one
        for played in self.workers.await_all():
            if new_run:
                learner.update_normalizer(torch.from_numpy(played.first_obs)[None].to(self.compute.device))
        self.queue, self.waiting = [], []
        self.predictor = Predictor(learner, all_buffers, self.compute)

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """False: running episodes cannot be saved, so every environment starts a new one."""
        return False

    def training_step(self) -> TrainingStats:
        """Take rollouts off the players and learn as soon as a batch is together."""
        assert self.workers is not None and self.predictor is not None
        self.predictor.check()
        before = self.learner.env_steps
        seconds = {"env": 0.0, "act": 0.0, "learn": 0.0}
        for number, played in self.workers.receive():
            self.waiting.append(number)
            arrays = {name: torch.from_numpy(array) for name, array in played.rollout.items()}
            self.queue.append(Rollout(**arrays, episodes=played.episodes).to(self.compute.device))
            for stage, value in played.seconds.items():
                seconds[stage] += value / len(self.workers.processes)
        began = time.perf_counter()
        episodes = self._learn()
        seconds["learn"] += time.perf_counter() - began
        return TrainingStats(self.learner.env_steps - before, episodes, seconds)

    def _learn(self) -> list[Episode]:
        """One step per full batch in the queue; the rest waits for more. Returns the games that ended in these batches.

        They are counted together with their decisions, so that going back to a snapshot drops both or neither.
        """
        have = sum(len(rollout.policy_version) for rollout in self.queue)
        if have < self.columns:
            return []
        waiting, episodes = Rollout.join(self.queue), []
        full = have // self.columns * self.columns
        assert self.workers is not None and self.predictor is not None
        for low in range(0, full, self.columns):
            batch = waiting.columns(low, low + self.columns)
            self.learner.learn(batch, batches=1)
            self.predictor.sync()
            episodes += batch.episodes
        self.queue = [waiting.columns(full, have)] if full < have else []
        self.workers.let_go_on(self.waiting)
        self.waiting = []
        return episodes

    def drain(self) -> TrainingStats:
        """Nothing: less than a batch waits in the queue, neither learned nor counted; it goes with its players."""
        return TrainingStats(0, [], {})

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the games live and end with their players."""
        return {}

    def close(self, failed: bool = False) -> None:
        """End predictor and players."""
        for task in (self.workers, self.predictor):
            if task is not None:
                task.close()
        self.workers = self.predictor = None
        self.queue = []


def run_actor(task: WorkerTask, buffers: InferenceBuffers, ask: Connection, pipe: Connection) -> None:
    """One player: environments, and no network of its own. Rollouts are whole, so no episode's last reward is lost."""
    config = task.config
    compute = Compute(config)
    net = RemoteNetwork(buffers, ask)
    collector = Collector(
        [task.make_envs()],
        net,  # type: ignore[arg-type]  # it is called like one
        config.rollout_steps,
        compute,
        task.sampling_seed,
    )
    pipe.send(Played(collector.buffers.next_obs.numpy(), {}, [], {}))
    names = [field.name for field in fields(Rollout) if field.name != "episodes"]
    while True:
        rollout = collector.collect()
        rollout.policy_version.fill_(sum(net.policy_version) / len(net.policy_version))
        net.policy_version.clear()
        arrays = {name: getattr(rollout, name).numpy() for name in names}
        seconds = {"env": collector.env_seconds, "act": collector.act_seconds}
        pipe.send(Played(None, arrays, rollout.episodes, seconds))
        pipe.recv_bytes()  # until the learner has got this far: one that plays on meanwhile is ever further out of date

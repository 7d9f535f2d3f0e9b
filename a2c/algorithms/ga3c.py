"""GA3C: actors without a network, a predictor evaluates it for all, a trainer learns from one queue.

Babaeizadeh et al. (2017), "Reinforcement learning through asynchronous advantage actor-critic on a GPU",
sections 4 and 5. Only the run's own process holds the network, on the GPU if there is one. The network is updated
between acting and learning: the *policy lag*, which is measured (metric `policy_lag`) and corrected by clipped
importance ratios and by log(pi + epsilon).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from a2c.algorithms.base import TrainingStats, merge_stats
from a2c.algorithms.predictor import InferenceBuffers, Predictor, RemoteNetwork, make_buffers
from a2c.algorithms.worker_tasks import WithoutEpisodes, WorkerTask, allow_workers, make_tasks
from a2c.collector import Collected, Collector
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.envs.single import Spaces
from a2c.envs.vector_env import Episode, in_order
from a2c.learner import Learner
from a2c.processes.pool import WorkerPool
from a2c.rollout import Rollout


class GA3C(WithoutEpisodes):
    """`--algorithm ga3c`: this thread is the trainer, a second one the predictor."""

    def __init__(self, config: Config, spaces: Spaces, learner: Learner, compute: Compute) -> None:
        self.config, self.spaces, self.learner, self.compute = config, spaces, learner, compute
        self.queue: list[Collected] = []
        self.waiting: list[int] = []  # actors whose rollouts are in the queue
        self.workers: WorkerPool | None = None
        self.predictor: Predictor | None = None

    def start(self, new_run: bool) -> None:
        """Start actors and predictor; `new_run`: the first observations feed the normaliser."""
        config, learner = self.config, self.learner
        tasks = make_tasks(config, learner.env_steps)
        allow_workers(config, tasks)
        all_buffers, arguments = {}, []
        for task in tasks:
            buffers = make_buffers(len(task.seeds), self.spaces, getattr(learner.net, "rnn_state_size", 0))
            here, there = Pipe()
            all_buffers[here] = buffers
            arguments.append((task, buffers, there, learner.noise))
        self.workers = WorkerPool(run_actor, arguments, config.env_timeout)
        for _, _, there, _ in arguments:
            there.close()  # so that the actor's end is the only one
        for first_obs in self.workers.await_all():
            if new_run:
                learner.update_normalizer(torch.from_numpy(first_obs)[None].to(self.compute.device))
        self.queue, self.waiting = [], []
        self.predictor = Predictor(learner, all_buffers, self.compute)

    def training_step(self) -> TrainingStats:
        """Receive rollouts from the actors; learn from them as soon as they make a minibatch."""
        assert self.workers is not None and self.predictor is not None
        self.predictor.check()
        before, stats = self.learner.env_steps, []
        for number, (arrays, episodes, seconds) in self.workers.receive():
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            tensors["obs"], tensors["next_obs"] = self.predictor.rollout_obs(number, tensors["next_obs"])
            rollout = Rollout(**tensors)
            rollout.check()  # before the flags are copied to a GPU
            self.waiting.append(number)
            self.queue.append(Collected(rollout.to(self.compute.device), episodes, seconds))
            stats.append(TrainingStats(0, [], seconds))
        began = time.perf_counter()
        learned = self._learn()
        seconds = merge_stats(stats, len(self.workers.processes)).seconds | {"learn": time.perf_counter() - began}
        return TrainingStats(self.learner.env_steps - before, learned, seconds)

    def _learn(self) -> list[Episode]:
        """Learn from what is in the queue, as `a2c` does from a rollout, in minibatches no smaller than a2c's.

        Returns the episodes that ended in it. They are counted together with their decisions, so that going back to
        an earlier state drops both or neither.
        """
        config, have = self.config, sum(collected.rollout.num_envs for collected in self.queue)
        num_minibatches = have * config.num_minibatches // config.num_envs
        if num_minibatches == 0:
            return []
        assert self.workers is not None and self.predictor is not None
        learned = join_collected(self.queue)
        self.learner.learn(learned.rollout, num_minibatches=num_minibatches)
        self.predictor.sync()
        self.queue = []
        self.workers.reply(self.waiting, self.learner.noise)
        self.waiting = []
        return learned.episodes

    def drain(self) -> TrainingStats:
        """Nothing to finish: less than a minibatch is in the queue; it is neither learned from nor counted."""
        return TrainingStats(0, [], {})

    def close(self, failed: bool = False) -> None:
        """End predictor and actors."""
        for task in (self.workers, self.predictor):
            if task is not None:
                task.close()
        self.workers = self.predictor = None
        self.queue = []


def join_collected(queue: Sequence[Collected]) -> Collected:
    """What several actors collected, side by side as one."""
    rollout = Rollout.join([collected.rollout for collected in queue])
    episodes, low = [], 0
    for collected in queue:
        episodes += [episode._replace(env=low + episode.env) for episode in collected.episodes]
        low += collected.rollout.num_envs
    return Collected(rollout, in_order(episodes), {})


def run_actor(
    task: WorkerTask, buffers: InferenceBuffers, requests: Connection, noise: float, pipe: Connection
) -> None:
    """One actor: environments, and no network of its own. `noise`: of its first rollout.

    It sends its first observations, then what it collects, a rollout as arrays: a copy, no shared memory. Its
    observations are missing, for the predictor has them. Rollouts are whole, so no episode's last reward is lost.
    `WorkerPool.close` kills it; its environments are not closed.
    """
    compute = Compute(task.config)
    net: Any = RemoteNetwork(buffers, requests)  # called like a network
    collector = Collector([task.make_envs()], net, task.config.rollout_steps, compute, task.sampling_seed)
    pipe.send(collector.next_obs.numpy())
    while True:
        collected = collector.collect(noise=noise)
        names = [field.name for field in fields(Rollout) if field.name != "obs"]
        arrays = {name: getattr(collected.rollout, name).numpy() for name in names}
        arrays["policy_version"] = np.full_like(arrays["policy_version"], net.mean_version())
        pipe.send((arrays, collected.episodes, collected.seconds))
        # Until the learner has reached this rollout: else the policy lag would grow without bound.
        noise = pipe.recv()

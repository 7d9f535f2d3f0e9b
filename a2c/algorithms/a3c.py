"""A3C: workers collect and learn on their own, and update one network that all of them share, without locks.

Mnih et al. (2016), "Asynchronous methods for deep reinforcement learning", algorithm S3; the steps are
those of Hogwild! (Recht et al., 2011). Returns, loss and step are those of a2c: one worker gives
the parameters of `a2c --threads 1`, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from a2c.algorithms.base import TrainingStats, merge_stats
from a2c.algorithms.worker_tasks import (
    READY,
    WithoutEpisodes,
    WorkerTask,
    allow_workers,
    make_tasks,
    move_to_shared_memory,
)
from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.envs.single import Spaces
from a2c.learner import Learner, Shared
from a2c.normalizers import FrameNorm, PixelNorm, slots_like
from a2c.policy import exploration_noise
from a2c.processes.pool import WorkerPool

OPTIMIZER_IMPORT = "torch._dynamo"  # an optimiser's first step imports it, which takes time: done before
METRICS_EVERY = 1.0  # seconds between the metrics of a worker's updates


class SharedCounters(NamedTuple):
    """What all workers see of the run, in shared memory. A worker writes its own rows only, so no lock is needed."""

    env_steps: Tensor  # [W + 1] int64, decisions of each worker; the last: of earlier sessions
    updates: Tensor  # [W + 1] int64
    reward_count: Tensor  # [W + 1] float64, by how much each has changed `Learner.reward_count`
    counted_at: Tensor  # [W] int64, env_steps when each has last changed its `reward_count`
    limit: Tensor  # [] int64, env_steps at which the run ends; negative while workers still start
    statistics: list[PixelNorm | FrameNorm]  # [W] normalisers, each fed by one worker; empty if the network has none
    rollout_decisions: int  # of all workers together

    def tensors(self) -> list[Tensor]:
        """The counts, without the normalisers."""
        return [field for field in self if isinstance(field, Tensor)]

    def finished(self) -> bool:
        """True once the workers together have taken enough decisions."""
        return int(self.env_steps.sum()) >= int(self.limit)


class WorkerReport(NamedTuple):
    """What a worker did in one rollout."""

    stats: TrainingStats
    updates: int
    reward_count: float  # the change of `Learner.reward_count`
    metrics: dict[str, float]  # of its last update; mostly empty


class A3C(WithoutEpisodes):
    """`--algorithm a3c`: starts the workers and counts what they report."""

    def __init__(self, config: Config, spaces: Spaces, learner: Learner, compute: Compute) -> None:
        self.config, self.spaces, self.learner, self.compute = config, spaces, learner, compute
        self.workers: WorkerPool | None = None
        for module in learner.net.modules():
            if type(module).__module__ == "__main__" or "<locals>" in type(module).__qualname__:
                name = type(module).__qualname__
                raise ValueError(f"network must be a class that a3c workers can import from a module, got {name}")

    def start(self, new_run: bool) -> None:
        """Start the workers; `new_run`: the first observations feed the normaliser."""
        config, learner = self.config, self.learner
        tasks = make_tasks(config, learner.env_steps)
        allow_workers(config, tasks)
        statistics = slots_like(learner.normalizer, len(tasks))
        env_steps, updates = (torch.tensor([0] * len(tasks) + [n]) for n in (learner.env_steps, learner.updates))
        reward_count = torch.tensor([0.0] * len(tasks) + [learner.reward_count], dtype=torch.float64)
        counted_at = torch.full([len(tasks)], learner.env_steps)
        self.counters = counters = SharedCounters(
            env_steps, updates, reward_count, counted_at, torch.tensor(-1), statistics, learner.rollout_decisions
        )
        moments = [value for state in learner.optimizer.state.values() for value in state.values()]
        seen = [buffer for slot in statistics for buffer in slot.buffers()]
        move_to_shared_memory([*learner.net.parameters(), *learner.net.buffers(), *moments, *counters.tensors(), *seen])
        arguments = [(task, self.spaces, learner.net, learner.optimizer, counters, new_run) for task in tasks]
        self.workers = WorkerPool(run_worker, arguments, config.env_timeout, preload=[OPTIMIZER_IMPORT])
        self.workers.await_all()
        learner.sync(statistics)
        counters.limit.fill_(config.session_end)

    def training_step(self) -> TrainingStats:
        """Wait for reports and add them up."""
        assert self.workers is not None
        reports: list[WorkerReport] = [report for _, report in self.workers.receive()]
        for report in reports:
            self.learner.add_remote(report.stats.env_steps, report.updates, report.reward_count, report.metrics)
        self.learner.sync(self.counters.statistics)
        return merge_stats([report.stats for report in reports], len(self.workers.processes))

    def drain(self) -> TrainingStats:
        """Let the workers finish their rollouts and end; returns the stats of these."""
        stats: list[TrainingStats] = []
        if self.workers is not None:
            self.counters.limit.zero_()
            while self.workers.at_work:
                stats.append(self.training_step())
        return merge_stats(stats, 1)

    def close(self, failed: bool = False) -> None:
        """End the workers; after a failure without waiting for those that close their environments."""
        if self.workers is not None:
            self.workers.close(wait_for_done=not failed)
        self.workers = None


def run_worker(
    task: WorkerTask,
    spaces: Spaces,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    counters: SharedCounters,
    new_run: bool,
    pipe: Connection,
) -> Callable[[], None]:
    """One worker: algorithm S3; returns what closes its environments. `net` and `optimizer` live in shared memory.

    `Learner.learn` takes the gradients on its replica and *copies* them into the `.grad` of `net`, which are this
    process's own, before each step. The classic line `shared.grad = local.grad` makes them one tensor, into which
    every later gradient is added, because `zero_grad` no longer zeroes but drops (torch 2.0 and later).
    """
    number, config = task.number, task.config
    compute = Compute(config)
    # Two workers that fed the same statistics at once could make a variance negative.
    statistics = counters.statistics[number] if counters.statistics else None
    learner = Learner(config, spaces, compute, Shared(net, optimizer, statistics, counters.rollout_decisions))
    envs = task.make_envs()
    collector = Collector([envs], learner.replica, config.rollout_steps, compute, task.sampling_seed)
    if new_run:
        learner.update_normalizer(collector.next_obs[None])

    def count() -> int:
        counters.updates[number] += 1
        return int(counters.updates.sum())

    import_module(OPTIMIZER_IMPORT)
    pipe.send(READY)
    while counters.limit < 0:
        time.sleep(0.001)
    sent = time.perf_counter() - METRICS_EVERY
    while not counters.finished():
        learner.sync(counters.statistics)  # the parameters as all workers together have left them
        # Workers that change it at once can leave less than 0 or more than there can be.
        reward_count = min(max(float(counters.reward_count.sum()), 0.0), float(config.exploration_rewards))
        noise = exploration_noise(config, reward_count)
        rollout, episodes, seconds = collector.collect(int(counters.updates.sum()), noise)
        began = time.perf_counter()
        before = int(counters.updates[number])
        counts = int(counters.env_steps.sum()), int(counters.updates.sum())
        counted_at = int(counters.counted_at.max())
        learner.set_counts(*counts, reward_count, counted_at)
        learner.learn(rollout, count=count)
        counters.env_steps[number] += len(rollout)
        change = learner.reward_count - reward_count
        if change < 0 and int(counters.counted_at.max()) != counted_at:
            change = 0.0  # another worker has met a reward meanwhile, or taken back for the same decisions
        else:
            counters.counted_at[number] = learner.counted_at
            counters.reward_count[number] += change
        now = time.perf_counter()
        due = now - sent >= METRICS_EVERY or counters.finished()
        metrics, sent = (learner.update_metrics(), now) if due else ({}, sent)
        stats = TrainingStats(len(rollout), episodes, {**seconds, "learn": now - began})
        pipe.send(WorkerReport(stats, int(counters.updates[number]) - before, change, metrics))
    return envs.close

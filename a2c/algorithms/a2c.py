"""A2C: collect a rollout from all environments, then learn from it, in turn (Mnih et al., 2016, made synchronous)."""

from __future__ import annotations

import time
from typing import Any

from a2c.algorithms.base import TrainingStats, merge_stats
from a2c.algorithms.captured import CapturedSteps
from a2c.algorithms.windows import make_windows
from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.envs.make import make_groups, run_seeds, sampling_seed
from a2c.envs.single import Spaces
from a2c.envs.vector_env import MonitoredVectorEnv, in_order
from a2c.learner import Learner
from a2c.rollout import Rollout

GROUPS = 1024  # sampling seeds reserved for each rank, one per group of environments; no rank has more groups


class A2C:
    """`--algorithm a2c`: one collector and one learner, one after the other."""

    def __init__(self, config: Config, spaces: Spaces, learner: Learner, compute: Compute) -> None:
        self.config, self.learner, self.compute = config, learner, compute
        self.groups: list[MonitoredVectorEnv] = []
        if compute.cuda_graphs:
            learner.replace_step(CapturedSteps(learner))
        self.windows = make_windows(config, learner.net)

    def start(self, new_run: bool) -> None:
        """Start the environments; the first observations of a new run feed the normaliser."""
        self.compute.ranks.on_every_rank(self._start_collector)
        if new_run:
            self.learner.update_normalizer(self.collector.next_obs[None])

    def _start_collector(self) -> None:
        config, compute, env_steps = self.config, self.compute, self.learner.env_steps
        seeds = run_seeds(config, env_steps)
        own_seeds = [seeds.envs[row] for row in compute.ranks.rows(config.num_envs)]
        self.groups = make_groups(config, own_seeds, compute.env_groups, compute.threads_per_group)
        steps = 1 if config.sliding_batch else config.rollout_steps
        seed = sampling_seed(seeds.sampling, compute.ranks.rank * GROUPS)
        self.collector = Collector(self.groups, self.learner.replica, steps, compute, seed)
        if compute.cuda_graphs:
            self.collector.capture()

    def training_step(self) -> TrainingStats:
        """The algorithm: collect a rollout with the current policy, then learn from it."""
        rollout, stats = self._collect()
        began = time.perf_counter()
        self.learner.learn(rollout, self.windows.push(rollout) if self.windows else None)
        return stats._replace(seconds=stats.seconds | {"learn": time.perf_counter() - began})

    def _collect(self) -> tuple[Rollout, TrainingStats]:
        """A rollout [T, N] of this process's environments; what was done here or, with torchrun, by all ranks."""
        ranks, rollouts = self.compute.ranks, list[Rollout]()

        def collect() -> TrainingStats:
            collected = self.collector.collect(self.learner.updates, self.learner.noise)
            rollouts.append(collected.rollout)
            rows = ranks.rows(self.config.num_envs)
            episodes = [episode._replace(env=rows[episode.env]) for episode in collected.episodes]
            return TrainingStats(len(collected.rollout), episodes, collected.seconds)

        stats = merge_stats(ranks.on_every_rank(collect), workers=ranks.size)  # with one rank: [collect()]
        return rollouts[0], stats._replace(episodes=in_order(stats.episodes))

    def drain(self) -> TrainingStats:
        """Nothing to finish: no rollout is being collected between two training steps."""
        return TrainingStats(0, [], {})

    def state_dict(self) -> dict[str, Any]:
        """The running episodes and everything else that the next rollout depends on, except the learner."""
        return {**self.collector.state_dict(), "windows": self.windows and self.windows.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue the episodes of `state_dict`; False if new episodes have begun in every environment."""
        same = self.collector.load_state_dict(state)
        if self.windows is not None and state["windows"] is not None:  # the run may not have had windows until now
            self.windows.load_state_dict(state["windows"])
            if not same:
                self.windows.new_episodes(self.config.num_envs)
        return same

    def close(self, failed: bool = False) -> None:
        """End the environments; `failed`: some may no longer respond, so they are killed without being asked."""
        for envs in self.groups if failed else []:
            envs.abandon()
        try:
            idle = self.compute.wait_idle()  # else a thread hangs: only what runs elsewhere can be ended
            for envs in self.groups:
                envs.close() if idle else envs.kill()
        except KeyboardInterrupt:
            if not failed:
                self.close(failed=True)
            raise
        self.groups = []

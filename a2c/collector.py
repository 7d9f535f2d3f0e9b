"""Collecting experience: environments and a network in, rollouts out.

Works with any SAME_STEP vector environment and any network with `(logits, values)` outputs; depends on
neither Atari nor the loss. Training, evaluation and recording all use this loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from a2c.compute.compute import Compute
from a2c.envs.make import sampling_seed
from a2c.envs.vector_env import Episode, MonitoredVectorEnv
from a2c.policy import Policy
from a2c.rollout import Rollout


class Collected(NamedTuple):
    """What `Collector.collect` returns."""

    rollout: Rollout
    episodes: list[Episode]  # that ended, in order
    seconds: dict[str, float]  # wall time of the stages env and act, mean of the groups
    steps: Sequence[int] = ()  # t in which each of the episodes ended; GA3C does not need it


class TruncatedStep(NamedTuple):
    """A truncated step `(t, n)`: its true final observation, and the rnn_state `[H]` after its decision."""

    t: int
    n: int
    obs: np.ndarray
    rnn_state: Tensor


class Collector:
    """Takes `rollout_steps` decisions in every environment and returns them as a `Rollout`.

    The environments come in groups. Each group has a compute thread and a `Policy` of its own: act, step,
    store, without waiting for other groups. Group g samples from a generator seeded with `sampling_seed(seed, g)`.
    The buffers are reused: a rollout is valid until the next `collect`.
    """

    def __init__(
        self,
        groups: Sequence[MonitoredVectorEnv],
        net: nn.Module,
        rollout_steps: int,
        compute: Compute,
        seed: int = 0,
        greedy: bool = False,
    ) -> None:
        self.groups, self.rollout_steps, self.compute = list(groups), rollout_steps, compute
        edges = np.cumsum([0, *(envs.num_envs for envs in groups)])
        self.slices = [slice(int(a), int(b)) for a, b in pairwise(edges)]
        self.policies = [
            Policy(net, envs.num_envs, compute.device, sampling_seed(seed, g), greedy) for g, envs in enumerate(groups)
        ]
        first_obs = self._new_episodes()
        buffers = Rollout.empty(rollout_steps, first_obs, self.policies[0].rnn_state.shape[1])
        self.buffers = replace(buffers, next_obs=first_obs)

    @property
    def next_obs(self) -> Tensor:
        """The observations `[N, ...]` that the next decision is taken on."""
        return self.buffers.next_obs

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `collect` depends on, besides the network; no episodes once a group has failed."""
        intact = not any(envs.broken for envs in self.groups)
        return {
            "next_obs": self.next_obs,
            "starts": self.starts,
            "device": self.compute.device.type,
            "policies": [policy.state_dict() for policy in self.policies],
            "envs": [envs.state_dict() if intact else None for envs in self.groups],
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore what `state_dict` returned; False where the episodes could not continue and new ones have begun."""
        if (state["device"], len(state["policies"])) != (self.compute.device.type, len(self.policies)):
            return False
        sizes = [envs and len(envs["scores"]) for envs in state["envs"]]
        same_rows = sizes == [envs.num_envs for envs in self.groups]
        for policy, saved in zip(self.policies, state["policies"], strict=True):
            policy.load_state_dict(saved, new_episodes=not same_rows)
        if not same_rows:
            return False
        if not all([envs.load_state_dict(saved) for envs, saved in zip(self.groups, state["envs"], strict=True)]):
            self.next_obs.copy_(self._new_episodes())
            return False
        for name, tensor in (("next_obs", self.next_obs), ("starts", self.starts)):
            if (state[name].shape, state[name].dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"{name} must be {tensor.dtype} {list(tensor.shape)}, got {list(state[name].shape)}")
            tensor.copy_(state[name])
        return True

    def _new_episodes(self) -> Tensor:
        """Begin an episode in every environment; their first observations `[N, ...]`."""
        first = [np.array(obs) for obs, _ in self.compute.map(lambda envs: envs.reset(), self.groups)]
        self.starts = torch.ones(sum(map(len, first)), dtype=torch.bool)  # [N] next_obs begins an episode
        return torch.from_numpy(np.concatenate(first)).to(self.compute.device)

    def collect(self, policy_version: float = 0.0) -> Collected:
        """Collect the next rollout: `rollout_steps * N` decisions of a policy after `policy_version` updates."""
        buffers, device = self.buffers, self.compute.device
        played = self.compute.map(self._play, range(len(self.groups)))
        finals = sorted((final for group in played for final in group[0]), key=lambda final: final[:2])
        episodes = sorted((t, episode) for group in played for t, episode in group[1])  # as they ended
        index = torch.tensor([(f.t, f.n) for f in finals], dtype=torch.int64).reshape(-1, 2)
        final_obs = torch.from_numpy(np.stack([f.obs for f in finals])) if finals else buffers.next_obs[:0]
        rollout = replace(
            buffers,
            final_index=index.to(device),
            final_obs=final_obs.to(device),
            final_rnn_state=torch.cat([buffers.next_rnn_state[:0], *(f.rnn_state[None] for f in finals)]),
            policy_version=torch.full_like(buffers.policy_version, policy_version),
        )
        env_seconds, act_seconds = (sum(group[i] for group in played) / len(played) for i in (2, 3))
        steps, ended = [t for t, _ in episodes], [episode for _, episode in episodes]
        return Collected(rollout, ended, {"env": env_seconds, "act": act_seconds}, steps)

    def _play(self, g: int) -> tuple[list[TruncatedStep], list[tuple[int, Episode]], float, float]:
        """One group's part: fills its columns; returns truncated steps, episodes (with t), seconds of env and act."""
        buffers, columns, envs, policy = self.buffers, self.slices[g], self.groups[g], self.policies[g]
        device = self.compute.device
        obs, starts = buffers.next_obs[columns], self.starts[columns]
        buffers.rnn_state[columns] = policy.rnn_state
        finals: list[TruncatedStep] = []
        episodes: list[tuple[int, Episode]] = []
        env_seconds, begin = 0.0, time.perf_counter()
        for t in range(self.rollout_steps):
            buffers.obs[t, columns] = obs
            buffers.starts[t, columns] = starts.to(device)
            decision = policy.act(buffers.obs[t, columns], buffers.starts[t, columns])
            buffers.actions[t, columns], buffers.log_probs[t, columns] = decision.actions, decision.log_probs
            buffers.values[t, columns] = decision.values
            on_host = decision.actions.cpu().numpy()  # device-to-host copy: one sync per step
            before = time.perf_counter()
            next_obs, rewards, terminated, truncated, info = envs.step(on_host)
            env_seconds += time.perf_counter() - before
            buffers.rewards[t, columns] = torch.from_numpy(rewards).to(device)
            buffers.terminated[t, columns] = torch.from_numpy(terminated).to(device)
            buffers.truncated[t, columns] = torch.from_numpy(truncated).to(device)
            cut = np.flatnonzero(truncated & ~terminated)
            finals += [
                TruncatedStep(t, columns.start + int(n), info["final_obs"][int(n)], policy.rnn_state[n]) for n in cut
            ]
            episodes += [(t, episode._replace(env=columns.start + episode.env)) for episode in info["episodes"]]
            obs, starts = torch.from_numpy(next_obs), torch.from_numpy(terminated | truncated)
        buffers.next_obs[columns], self.starts[columns] = obs, starts
        buffers.next_rnn_state[columns] = policy.rnn_state
        return finals, episodes, env_seconds, time.perf_counter() - begin - env_seconds

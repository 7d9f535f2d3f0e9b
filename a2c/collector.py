"""Collecting experience: environments and a network in, rollouts out.

Works with any `MonitoredVectorEnv`, which wraps a vector environment whose autoreset mode is gymnasium's SAME_STEP
(where an episode has ended, the observation begins the next one), and any network with `(logits, values)` outputs;
depends on neither Atari nor the loss. Training, evaluation and recording all use this loop.
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
from a2c.compute.staging import Staging, pinned, to_device
from a2c.envs.make import sampling_seed
from a2c.envs.vector_env import Episode, MonitoredVectorEnv, in_order
from a2c.policy import Policy, check_finite
from a2c.rollout import Rollout


class Collected(NamedTuple):
    """What `Collector.collect` returns."""

    rollout: Rollout
    episodes: list[Episode]  # that ended, in order
    seconds: dict[str, float]  # wall time of the stages env and act, mean of the groups


class TruncatedStep(NamedTuple):
    """A truncated step `(t, n)`: its true final observation, and the rnn_state `[H]` after its decision."""

    t: int
    n: int
    obs: np.ndarray
    rnn_state: Tensor


class Played(NamedTuple):
    """One group's part of a rollout, besides what is in the buffers."""

    finals: list[TruncatedStep]
    episodes: list[Episode]
    env_seconds: float
    act_seconds: float


class Collector:
    """Takes `rollout_steps` decisions in every environment and returns them as a `Rollout`.

    The environments come in groups. Each group has a compute thread and a `Policy` of its own: act, step,
    store, without waiting for other groups. Group g samples from a generator seeded with `sampling_seed(seed, g)`.
    The buffers are reused: a rollout is valid until the next `collect`. Rewards and flags are written to buffers in
    main memory, `host`, and copied to a GPU once per rollout; on the CPU these are the rollout's own.

    `groups`: a `MonitoredVectorEnv` for each; `net`: network with outputs `(logits [B, A], values [B, 1])`; `seed`: of
    the sampling; `greedy`: take the most likely actions.
    """

    HOST = ("rewards", "terminated", "truncated", "starts")

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
        self.host = self.buffers
        if compute.device.type != "cpu":
            on_host = {name: pinned(getattr(buffers, name).cpu(), compute.device) for name in self.HOST}
            self.host = replace(self.buffers, **on_host)
        self.staging = [
            Staging(first_obs[columns], envs.stacked and compute.device.type != "cpu")
            for envs, columns in zip(groups, self.slices, strict=True)
        ]

    @property
    def next_obs(self) -> Tensor:
        """The observations `[N, ...]` that the next decision is taken on."""
        return self.buffers.next_obs

    def capture(self) -> None:
        """Let every group act by replays from now on (see `Policy.capture`); call it while no group acts."""
        for policy, columns in zip(self.policies, self.slices, strict=True):
            policy.capture(self.next_obs[columns])

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
        """Restore what `state_dict` returned; False if the episodes could not continue and new ones have begun."""
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

    def collect(self, policy_version: float = 0.0, noise: float = 0.0) -> Collected:
        """Collect the next rollout: `rollout_steps` decisions in each of the N environments.

        `policy_version`: updates of the network so far. `noise`: scale of the noise on the logits (`Policy.perturb`).
        Raises WorkerError if an environment fails, FloatingPointError if logits are NaN or plus infinity.
        """
        buffers, device = self.buffers, self.compute.device
        for policy in self.policies:
            policy.perturb(noise)
        played = self.compute.map(self._play, range(len(self.groups)))
        finals = sorted((final for part in played for final in part.finals), key=lambda final: final[:2])
        episodes = in_order(episode for part in played for episode in part.episodes)
        index = torch.tensor([(f.t, f.n) for f in finals], dtype=torch.int64).reshape(-1, 2)
        no_obs = buffers.next_obs[:0]
        final_obs = to_device(torch.from_numpy(np.stack([f.obs for f in finals])), device) if finals else no_obs
        rollout = replace(
            self.host,
            final_index=index,
            final_obs=final_obs,
            final_rnn_state=torch.cat([buffers.next_rnn_state[:0], *(f.rnn_state[None] for f in finals)]),
            policy_version=torch.full_like(buffers.policy_version, policy_version),
        )
        rollout = self._copy_to_device(rollout)
        check_finite(buffers.log_probs)  # waits for the copies, too: the buffers in main memory may be used again
        seconds = {
            "env": sum(part.env_seconds for part in played) / len(played),
            "act": sum(part.act_seconds for part in played) / len(played),
        }
        return Collected(rollout, episodes, seconds)

    def _copy_to_device(self, rollout: Rollout) -> Rollout:
        """`rollout` with what was written in main memory on the device; on the CPU it is there already."""
        if self.host is self.buffers:
            return rollout
        rollout.check()  # before the copy: no device has to be waited for
        copies = {
            name: getattr(self.buffers, name).copy_(getattr(rollout, name), non_blocking=True) for name in self.HOST
        }
        return replace(rollout, **copies)

    def _play(self, g: int) -> Played:
        """One group's part: fills its columns of the buffers."""
        buffers, host, columns, envs = self.buffers, self.host, self.slices[g], self.groups[g]
        policy, staging = self.policies[g], self.staging[g]
        buffers.rnn_state[columns] = policy.rnn_state
        buffers.obs[0, columns], host.starts[0, columns] = buffers.next_obs[columns], self.starts[columns]
        finals: list[TruncatedStep] = []
        episodes: list[Episode] = []
        env_seconds, begin = 0.0, time.perf_counter()
        for t in range(self.rollout_steps):
            obs, starts, last = buffers.obs[t, columns], buffers.starts[t, columns], t + 1 == self.rollout_steps
            if policy.recurrent:  # no other network reads them
                starts.copy_(host.starts[t, columns], non_blocking=True)
            decision = policy.decide(obs, starts)
            buffers.actions[t, columns], buffers.log_probs[t, columns] = decision.actions, decision.log_probs
            buffers.values[t, columns] = decision.values
            actions = staging.actions_on_host(decision.actions)
            before = time.perf_counter()
            next_obs, rewards, terminated, truncated, info = envs.step(actions)
            env_seconds += time.perf_counter() - before
            host.rewards[t, columns] = torch.from_numpy(rewards)
            host.terminated[t, columns] = torch.from_numpy(terminated)
            host.truncated[t, columns] = torch.from_numpy(truncated)
            cut = np.flatnonzero(truncated & ~terminated)
            finals += [
                TruncatedStep(t, columns.start + int(n), info["final_obs"][int(n)], policy.rnn_state[n]) for n in cut
            ]
            episodes += [episode._replace(env=columns.start + episode.env, t=t) for episode in info["episodes"]]
            ended = terminated | truncated
            staging.store(next_obs, ended, obs, buffers.next_obs[columns] if last else buffers.obs[t + 1, columns])
            (self.starts[columns] if last else host.starts[t + 1, columns]).copy_(torch.from_numpy(ended))
        buffers.next_rnn_state[columns] = policy.rnn_state
        return Played(finals, episodes, env_seconds, time.perf_counter() - begin - env_seconds)

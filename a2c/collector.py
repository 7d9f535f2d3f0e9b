"""Collecting experience: environments and a network in, rollouts out.

Any SAME_STEP vector environment and any network with `(logits, values)` outputs will do;
this module knows neither Atari nor the loss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from a2c.compute.compute import Compute
from a2c.envs.vector_env import Episode, MonitoredVectorEnv
from a2c.policy import initial_state, sample, step
from a2c.rollout import Rollout


class Final(NamedTuple):
    """A truncated step `(t, n)`: its true final observation, and the memory `[M]` after its decision."""

    t: int
    n: int
    obs: np.ndarray
    rnn_state: Tensor


class Collector:
    """Plays `rollout_steps` decisions in every environment and returns them as a `Rollout`.

    The environments come in groups. Each group is played by a compute thread of its own: act,
    step, store, with nothing to wait for but itself. The buffers are reused: a rollout is
    valid until the next `collect`. Each group samples from a generator seeded by `seed` and its number.
    """

    def __init__(
        self, groups: Sequence[MonitoredVectorEnv], net: nn.Module, rollout_steps: int, compute: Compute, seed: int = 0
    ) -> None:
        self.groups, self.net, self.rollout_steps, self.compute = list(groups), net, rollout_steps, compute
        self.generators = [torch.Generator(compute.device).manual_seed(seed + 7919 * g) for g in range(len(groups))]
        edges = np.cumsum([0, *(envs.num_envs for envs in groups)])
        self.columns = [slice(int(a), int(b)) for a, b in pairwise(edges)]
        next_obs = self._new_games()
        self.buffers = Rollout.empty(rollout_steps, next_obs, initial_state(net, 0).shape[1])
        self.buffers.next_obs = next_obs
        self.env_seconds = self.act_seconds = 0.0  # summed over the last collect, mean of the groups

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `collect` depends on, besides the network; no games once one has failed."""
        intact = not any(envs.broken for envs in self.groups)
        return {
            "next_obs": self.buffers.next_obs,
            "rnn_state": self.buffers.next_rnn_state,
            "starts": self.starts,
            "device": self.compute.device.type,
            "generators": [generator.get_state() for generator in self.generators],
            "envs": [envs.state_dict() if intact else None for envs in self.groups],
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on where `state_dict` was taken; False where the games could not go on and new ones have begun."""
        if (state["device"], len(state["generators"])) != (self.compute.device.type, len(self.generators)):
            return False
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved)
        sizes = [envs and len(envs["scores"]) for envs in state["envs"]]
        if sizes != [envs.num_envs for envs in self.groups]:
            return False
        if not all([envs.load_state_dict(saved) for envs, saved in zip(self.groups, state["envs"], strict=True)]):
            self.buffers.next_obs.copy_(self._new_games())
            return False
        mine = {"next_obs": self.buffers.next_obs, "rnn_state": self.buffers.next_rnn_state, "starts": self.starts}
        for name, tensor in mine.items():
            if (state[name].shape, state[name].dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"{name} must be {tensor.dtype} {list(tensor.shape)}, got {list(state[name].shape)}")
            tensor.copy_(state[name])
        return True

    def _new_games(self) -> Tensor:
        """Begin a game in every environment; their first observations `[N, ...]`."""
        first = [np.array(obs) for obs, _ in self.compute.map(lambda envs: envs.reset(), self.groups)]
        self.starts = torch.ones(sum(map(len, first)), dtype=torch.bool)  # [N] next_obs begins an episode
        return torch.from_numpy(np.concatenate(first)).to(self.compute.device)

    def collect(self) -> Rollout:
        """Play and return the next rollout, of `rollout_steps * N` decisions."""
        played = self.compute.map(self._play, range(len(self.groups)))
        finals = sorted((final for group in played for final in group[0]), key=lambda final: final[:2])
        rollout = self.buffers
        episodes = sorted((t, episode) for group in played for t, episode in group[1])  # as they ended
        rollout.episodes = [episode for _, episode in episodes]
        rollout.final_index = (
            torch.tensor([(f.t, f.n) for f in finals], dtype=torch.int64).reshape(-1, 2).to(rollout.obs.device)
        )
        rollout.final_obs = (
            torch.from_numpy(np.stack([f.obs for f in finals])).to(rollout.obs.device)
            if finals
            else rollout.next_obs[:0]
        )
        rollout.final_rnn_state = torch.cat([rollout.next_rnn_state[:0], *(f.rnn_state[None] for f in finals)])
        self.env_seconds = sum(group[2] for group in played) / len(played)
        self.act_seconds = sum(group[3] for group in played) / len(played)
        return rollout

    @torch.no_grad()
    def _play(self, g: int) -> tuple[list[Final], list[tuple[int, Episode]], float, float]:
        """One group's part: fills its columns; returns cut-off final observations, games (with t), seconds."""
        buffers, columns, envs = self.buffers, self.columns[g], self.groups[g]
        obs, starts, rnn_state = buffers.next_obs[columns], self.starts[columns], buffers.next_rnn_state[columns]
        buffers.rnn_state[columns] = rnn_state
        finals: list[Final] = []
        episodes: list[tuple[int, Episode]] = []
        env_seconds, begin = 0.0, time.perf_counter()
        for t in range(self.rollout_steps):
            buffers.obs[t, columns] = obs
            buffers.starts[t, columns] = starts.to(buffers.obs.device)
            logits, values, rnn_state = step(self.net, buffers.obs[t, columns], rnn_state, buffers.starts[t, columns])
            actions, log_probs = self._sample(logits.float(), self.generators[g])
            buffers.actions[t, columns], buffers.log_probs[t, columns] = actions, log_probs
            buffers.values[t, columns] = values.float().squeeze(1)
            on_host = actions.cpu().numpy()  # device-to-host copy: one sync per step
            before = time.perf_counter()
            next_obs, rewards, terminated, truncated, info = envs.step(on_host)
            env_seconds += time.perf_counter() - before
            buffers.rewards[t, columns] = torch.from_numpy(rewards).to(buffers.obs.device)
            buffers.terminated[t, columns] = torch.from_numpy(terminated).to(buffers.obs.device)
            buffers.truncated[t, columns] = torch.from_numpy(truncated).to(buffers.obs.device)
            cut = np.flatnonzero(truncated & ~terminated)
            finals += [Final(t, columns.start + int(n), info["final_obs"][int(n)], rnn_state[n]) for n in cut]
            episodes += [(t, game._replace(env=columns.start + game.env)) for game in info["episodes"]]
            obs, starts = torch.from_numpy(next_obs), torch.from_numpy(terminated | truncated)
        buffers.next_obs[columns], self.starts[columns], buffers.next_rnn_state[columns] = obs, starts, rnn_state
        return finals, episodes, env_seconds, time.perf_counter() - begin - env_seconds

    def _sample(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        try:
            return sample(logits, generator)
        except RuntimeError as error:
            if logits.isfinite().all():
                raise
            raise FloatingPointError(
                "the policy's logits are NaN or infinite: an observation or a parameter is too; "
                "the last checkpoint is kept"
            ) from error

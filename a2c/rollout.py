"""Collecting experience: environments and a network in, time-major rollouts out.

Any SAME_STEP vector environment and any network with `(logits, values)` outputs will do;
this room knows neither Atari nor the loss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from a2c.compute import Compute
from a2c.games import Episode, GameEnvs


@dataclass
class Rollout:
    """`T` decisions of `N` environments, acted by one fixed policy.

    =========== ============= ============================================================
    name        shape         meaning
    =========== ============= ============================================================
    obs         [T, N, ...]   what the policy saw (uint8 for Atari)
    actions     [T, N] int64  what it did
    rewards     [T, N] f32    raw game points it got
    terminated  [T, N] bool   the episode ended with this decision
    truncated   [T, N] bool   the episode was cut off with this decision
    starts      [T, N] bool   obs[t] begins an episode
    values      [T, N] f32    V(obs[t]) when acting
    next_values [T, N] f32    V of what followed decision t, when acting: of the true final
                              observation where truncated, without meaning where terminated
    log_probs   [T, N] f32    log-probability of actions[t] when acting
    next_obs    [N, ...]      observation after the last decision
    final_index [K, 2] int64  (t, n) of each truncated step
    final_obs   [K, ...]      its true final observation
    =========== ============= ============================================================
    """

    obs: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    starts: Tensor
    values: Tensor
    next_values: Tensor
    log_probs: Tensor
    next_obs: Tensor
    final_index: Tensor
    final_obs: Tensor
    episodes: list[Episode] = field(default_factory=list)

    @staticmethod
    def empty(steps: int, like: Tensor) -> Rollout:
        """Buffers for `steps` decisions of the environments that gave the observations `like [N, ...]`."""
        num_envs, *obs_shape = like.shape

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        flags = [make(torch.bool, steps, num_envs) for _ in range(3)]
        return Rollout(
            make(like.dtype, steps, num_envs, *obs_shape),
            make(torch.int64, steps, num_envs),
            make(torch.float32, steps, num_envs),
            *flags,
            *(make(torch.float32, steps, num_envs) for _ in range(3)),
            make(like.dtype, num_envs, *obs_shape),
            make(torch.int64, 0, 2),
            make(like.dtype, 0, *obs_shape),
        )

    def split(self, parts: int) -> list[Rollout]:
        """At most `parts` rollouts of whole windows, split by environment; views, no copies."""
        parts = min(parts, self.actions.shape[1])
        edges = [-(-i * self.actions.shape[1] // parts) for i in range(parts + 1)]
        return [self.columns(low, high) for low, high in pairwise(edges)]

    def columns(self, low: int, high: int) -> Rollout:
        """The environments `low <= n < high` of this rollout, as views."""
        mine = (self.final_index[:, 1] >= low) & (self.final_index[:, 1] < high)
        index = self.final_index[mine] - torch.tensor([0, low], device=self.final_index.device)
        views = {f.name: getattr(self, f.name)[:, low:high] for f in fields(self)[:9]}
        return Rollout(
            **views, next_obs=self.next_obs[low:high], final_index=index, final_obs=self.final_obs[mine], episodes=[]
        )

    def __len__(self) -> int:
        return self.actions.numel()


class Collector:
    """Plays `rollout_steps` decisions in every environment and returns them as a `Rollout`.

    The environments come in groups. Each group is played by a compute thread of its own: act,
    step, store, with nothing to wait for but itself. The buffers are reused: a rollout is
    valid until the next `collect`. Each group samples from a generator seeded by `seed` and its number.
    """

    def __init__(
        self, groups: Sequence[GameEnvs], net: nn.Module, rollout_steps: int, compute: Compute, seed: int = 0
    ) -> None:
        self.groups, self.net, self.rollout_steps, self.compute = list(groups), net, rollout_steps, compute
        self.generators = [torch.Generator(compute.device).manual_seed(seed + 7919 * g) for g in range(len(groups))]
        edges = np.cumsum([0, *(envs.num_envs for envs in groups)])
        self.columns = [slice(int(a), int(b)) for a, b in pairwise(edges)]
        next_obs = self._new_games()
        self.buffers = Rollout.empty(rollout_steps, next_obs)
        self.buffers.next_obs = next_obs
        self.env_seconds = self.act_seconds = 0.0  # summed over the last collect, mean of the groups

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next `collect` depends on, besides the network; no games once one has failed."""
        intact = not any(envs.broken for envs in self.groups)
        return {
            "next_obs": self.buffers.next_obs,
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
        self.buffers.next_obs.copy_(state["next_obs"])
        self.starts.copy_(state["starts"])
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
            torch.tensor([f[:2] for f in finals], dtype=torch.int64).reshape(-1, 2).to(rollout.obs.device)
        )
        rollout.final_obs = (
            torch.from_numpy(np.stack([f[2] for f in finals])).to(rollout.obs.device)
            if finals
            else rollout.next_obs[:0]
        )
        self.env_seconds = sum(group[2] for group in played) / len(played)
        self.act_seconds = sum(group[3] for group in played) / len(played)
        return rollout

    @torch.no_grad()
    def _play(self, g: int) -> tuple[list[tuple[int, int, np.ndarray]], list[tuple[int, Episode]], float, float]:
        """One group's part: fills its columns; returns cut-off final observations, games (with t), seconds."""
        buffers, columns, envs = self.buffers, self.columns[g], self.groups[g]
        obs, starts = buffers.next_obs[columns], self.starts[columns]
        finals: list[tuple[int, int, np.ndarray]] = []
        episodes: list[tuple[int, Episode]] = []
        env_seconds, begin = 0.0, time.perf_counter()
        for t in range(self.rollout_steps):
            buffers.obs[t, columns] = obs
            buffers.starts[t, columns] = starts.to(buffers.obs.device)
            logits, values = self.net(buffers.obs[t, columns])
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
            finals += [(t, columns.start + int(n), info["final_obs"][int(n)]) for n in cut]
            episodes += [(t, game._replace(env=columns.start + game.env)) for game in info["episodes"]]
            obs, starts = torch.from_numpy(next_obs), torch.from_numpy(terminated | truncated)
        buffers.next_obs[columns], self.starts[columns] = obs, starts
        self._bootstrap(columns, finals)
        return finals, episodes, env_seconds, time.perf_counter() - begin - env_seconds

    def _sample(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        try:
            return sample(logits, generator)
        except RuntimeError as error:
            if logits.isfinite().all():
                raise
            raise FloatingPointError(
                "the policy's logits are no numbers: an observation or a parameter is not finite; "
                "the last checkpoint is kept"
            ) from error

    def _bootstrap(self, columns: slice, finals: list[tuple[int, int, np.ndarray]]) -> None:
        """Value what followed each decision of one group; one pass for all that no decision was taken in."""
        buffers = self.buffers
        buffers.next_values[:-1, columns] = buffers.values[1:, columns]
        behind = buffers.next_obs[columns]
        if finals:
            cut_off = torch.from_numpy(np.stack([obs for _, _, obs in finals])).to(behind.device)
            behind = torch.cat([behind, cut_off])
        values = self.net(behind)[1].float().squeeze(1)  # [n + K]
        size = columns.stop - columns.start
        buffers.next_values[-1, columns] = values[:size]
        for (t, n, _), value in zip(finals, values[size:], strict=True):
            buffers.next_values[t, n] = value


def sample(logits: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Draw `actions [B]` from `logits [B, A]`, with their log-probabilities `[B]`."""
    log_probs = torch.log_softmax(logits, dim=1)
    actions = torch.multinomial(log_probs.exp(), 1, generator=generator)  # [B, 1]
    return actions.squeeze(1), log_probs.gather(1, actions).squeeze(1)

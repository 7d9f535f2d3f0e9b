"""Experience: what the environments and the policy did, time-major."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import pairwise

import torch
from torch import Tensor

from a2c.games import Episode


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
    memory      [N, M]        what the network carried into obs[0] (see `a2c.recurrent`)
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
    memory: Tensor
    next_obs: Tensor
    final_index: Tensor
    final_obs: Tensor
    episodes: list[Episode] = field(default_factory=list)

    @staticmethod
    def empty(steps: int, like: Tensor, memory_size: int = 0) -> Rollout:
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
            make(torch.float32, num_envs, memory_size),
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
            **views,
            memory=self.memory[low:high],
            next_obs=self.next_obs[low:high],
            final_index=index,
            final_obs=self.final_obs[mine],
        )

    def __len__(self) -> int:
        return self.actions.numel()

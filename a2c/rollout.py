"""Experience: what the environments and the policy did, time-major."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from a2c.envs.vector_env import Episode

WINDOWS = (  # fields of shape [T, N, ...]
    *("obs", "actions", "rewards", "terminated", "truncated", "starts", "values", "log_probs"),
)

AROUND = ("rnn_state", "next_obs", "next_rnn_state", "final_index", "final_obs", "final_rnn_state")


@dataclass
class Rollout:
    """`T` decisions of `N` environments, acted by one policy (with GA3C, one that moves meanwhile).

    ============ ============= ===========================================================
    name         shape         meaning
    ============ ============= ===========================================================
    obs          [T, N, ...]   what the policy saw (uint8 for Atari)
    actions      [T, N] int64  what it did
    rewards      [T, N] f32    raw game points it got
    terminated   [T, N] bool   the episode ended with this decision
    truncated    [T, N] bool   the episode was cut off with this decision
    starts       [T, N] bool   obs[t] begins an episode
    values       [T, N] f32    V(obs[t]) when acting
    log_probs    [T, N] f32    log-probability of actions[t] when acting
    memory       [N, M]        what the network carried into obs[0] (see `a2c.policy`)
    versions     [N] f64       updates that the acting policy had seen, mean over the window
    next_obs     [N, ...]      observation after the last decision
    next_memory  [N, M]        what the network carries into next_obs
    final_index  [K, 2] int64  (t, n) of each step that is truncated and not terminated, in any order
    final_obs    [K, ...]      its true final observation
    final_memory [K, M]        what the network carries into it
    ============ ============= ===========================================================
    """

    obs: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    starts: Tensor
    values: Tensor
    log_probs: Tensor
    rnn_state: Tensor
    policy_version: Tensor
    next_obs: Tensor
    next_rnn_state: Tensor
    final_index: Tensor
    final_obs: Tensor
    final_rnn_state: Tensor
    episodes: list[Episode] = field(default_factory=list)

    @staticmethod
    def empty(steps: int, like: Tensor, rnn_state_size: int = 0) -> Rollout:
        """Buffers for `steps` decisions of the environments that gave the observations `like [N, ...]`."""
        num_envs, *obs_shape = like.shape

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        return Rollout(
            obs=make(like.dtype, steps, num_envs, *obs_shape),
            actions=make(torch.int64, steps, num_envs),
            rewards=make(torch.float32, steps, num_envs),
            terminated=make(torch.bool, steps, num_envs),
            truncated=make(torch.bool, steps, num_envs),
            starts=make(torch.bool, steps, num_envs),
            values=make(torch.float32, steps, num_envs),
            log_probs=make(torch.float32, steps, num_envs),
            rnn_state=make(torch.float32, num_envs, rnn_state_size),
            policy_version=torch.zeros(num_envs, dtype=torch.float64),  # on the host, where it is read
            next_obs=make(like.dtype, num_envs, *obs_shape),
            next_rnn_state=make(torch.float32, num_envs, rnn_state_size),
            final_index=make(torch.int64, 0, 2),
            final_obs=make(like.dtype, 0, *obs_shape),
            final_rnn_state=make(torch.float32, 0, rnn_state_size),
        )

    def check(self) -> None:
        """ValueError unless `final_index` names each step that was truncated and not terminated, once.

        A step without its entry would be bootstrapped from the next episode. On a GPU this waits for it twice.
        """
        wanted = (self.truncated & ~self.terminated).nonzero()  # [K, 2]
        order = (self.final_index[:, 0] * self.truncated.shape[1] + self.final_index[:, 1]).argsort()
        if not torch.equal(self.final_index[order], wanted):
            raise ValueError(
                "final_index must name each step (t, n) that is truncated and not terminated once, "
                f"got {self.final_index.tolist()} for {wanted.tolist()}"
            )
        for name in ("final_obs", "final_rnn_state"):
            if len(getattr(self, name)) != len(wanted):
                raise ValueError(f"{name} must have a row for each of final_index, got {len(getattr(self, name))}")

    def split(self, parts: int) -> list[Rollout]:
        """At most `parts` rollouts of whole windows, split by environment; views, no copies."""
        envs = self.actions.shape[1]
        return [self.columns(low, high) for low, high in pairwise(split_edges(envs, min(parts, envs)))]

    def columns(self, low: int, high: int) -> Rollout:
        """The environments `low <= n < high` of this rollout, as views, with their finished games."""
        mine = (self.final_index[:, 1] >= low) & (self.final_index[:, 1] < high)
        index = self.final_index[mine] - torch.tensor([0, low], device=self.final_index.device)
        views = {name: getattr(self, name)[:, low:high] for name in WINDOWS}
        return Rollout(
            **views,
            rnn_state=self.rnn_state[low:high],
            policy_version=self.policy_version[low:high],
            next_obs=self.next_obs[low:high],
            next_rnn_state=self.next_rnn_state[low:high],
            final_index=index,
            final_obs=self.final_obs[mine],
            final_rnn_state=self.final_rnn_state[mine],
            episodes=[game._replace(env=game.env - low) for game in self.episodes if low <= game.env < high],
        )

    @staticmethod
    def join(rollouts: Sequence[Rollout]) -> Rollout:
        """Rollouts of the same length side by side, as one; what `split` took apart."""
        edges = list(accumulate((len(r.policy_version) for r in rollouts), initial=0))[:-1]
        index = [
            r.final_index + torch.tensor([0, low], device=r.final_index.device)
            for r, low in zip(rollouts, edges, strict=True)
        ]
        names = [f.name for f in fields(Rollout) if f.name not in ("final_index", "episodes")]
        joined = {name: torch.cat([getattr(r, name) for r in rollouts], dim=int(name in WINDOWS)) for name in names}
        episodes = [
            game._replace(env=game.env + low) for r, low in zip(rollouts, edges, strict=True) for game in r.episodes
        ]
        return Rollout(**joined, final_index=torch.cat(index), episodes=episodes)

    def to(self, device: torch.device) -> Rollout:
        """The same rollout on `device`; what is read on the host stays there."""
        off_policy = {name: getattr(self, name).to(device) for name in (*WINDOWS, *AROUND)}
        return Rollout(**off_policy, policy_version=self.policy_version, episodes=self.episodes)

    def __len__(self) -> int:
        return self.actions.numel()


def split_edges(envs: int, parts: int) -> list[int]:
    """Where `envs` columns are cut into parts of almost equal size: part i has columns `edges[i]` to `edges[i + 1]`."""
    return [-(-i * envs // parts) for i in range(parts + 1)]

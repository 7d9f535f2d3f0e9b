"""A rollout: what the environments and the policy did, time-major; its returns, and the batch that the loss takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from a2c.compute.staging import to_device
from a2c.policy import replay, step
from a2c.returns import lambda_returns

# ruff: noqa: RUF009  a field with metadata is no shared default


def _tensor(axes: str, dtype: torch.dtype | None = None, on_host: bool = False) -> Any:
    """A field of `Rollout`: its axes (T, N, K, H; `*` the axes of an observation; 2), its dtype (None: that of obs).

    `on_host`: it stays in main memory, even where the other fields are on a GPU.
    """
    return field(metadata={"axes": axes, "dtype": dtype, "on_host": on_host})


@dataclass
class Rollout:
    """`T` decisions of `N` environments, taken by one policy (with GA3C, one that is updated meanwhile).

    H is the size of an rnn_state, K the number of truncated, not terminated steps; "TN*" means `[T, N, *obs_shape]`.
    """

    obs: Tensor = _tensor("TN*")  # what the policy saw (uint8 for Atari)
    actions: Tensor = _tensor("TN", torch.int64)  # what it did
    rewards: Tensor = _tensor("TN", torch.float32)  # raw points of the game
    terminated: Tensor = _tensor("TN", torch.bool)  # the episode, or a life that counts as one, ended here
    truncated: Tensor = _tensor("TN", torch.bool)  # the episode was cut off with this decision
    starts: Tensor = _tensor("TN", torch.bool)  # obs[t] begins an episode (or a life that counts as one)
    values: Tensor = _tensor("TN", torch.float32)  # V(obs[t]) when acting, or by `valued_by`
    log_probs: Tensor = _tensor("TN", torch.float32)  # log-probability of actions[t] when acting
    rnn_state: Tensor = _tensor("NH", torch.float32)  # what the network carried into obs[0]
    next_obs: Tensor = _tensor("N*")  # observation after the last decision
    next_rnn_state: Tensor = _tensor("NH", torch.float32)  # what the network carries into next_obs
    # (t, n) of each truncated, not terminated step, in any order
    final_index: Tensor = _tensor("K2", torch.int64, on_host=True)
    final_obs: Tensor = _tensor("K*")  # its true final observation
    final_rnn_state: Tensor = _tensor("KH", torch.float32)  # what the network carries into it
    policy_version: Tensor = _tensor("N", torch.float64, on_host=True)  # updates of the acting policy, mean over T

    @staticmethod
    def empty(steps: int, like: Tensor, rnn_state_size: int = 0) -> Rollout:
        """Buffers for `steps` decisions of the environments that gave the observations `like [N, ...]`."""
        num_envs, *obs_shape = like.shape
        sizes = {"T": [steps], "N": [num_envs], "K": [0], "H": [rnn_state_size], "2": [2], "*": obs_shape}

        def make(axes: str, dtype: torch.dtype | None, on_host: bool) -> Tensor:
            shape = [size for axis in axes for size in sizes[axis]]
            return torch.zeros(shape, dtype=dtype or like.dtype, device="cpu" if on_host else like.device)

        return Rollout(**{f.name: make(**f.metadata) for f in fields(Rollout)})

    @property
    def num_envs(self) -> int:
        """Number of environments N."""
        return self.actions.shape[1]

    def check(self) -> None:
        """ValueError unless `final_index` names each step that was truncated and not terminated, once.

        A step without its entry would be bootstrapped from the next episode. Waits for a GPU where the flags are there.
        """
        wanted = (self.truncated & ~self.terminated).cpu().nonzero()  # [K, 2]
        order = (self.final_index[:, 0] * self.num_envs + self.final_index[:, 1]).argsort()
        if not torch.equal(self.final_index[order], wanted):
            raise ValueError(
                "final_index must name each step (t, n) that is truncated and not terminated once, "
                f"got {self.final_index.tolist()} for {wanted.tolist()}"
            )
        for name in ("final_obs", "final_rnn_state"):
            if len(getattr(self, name)) != len(wanted):
                raise ValueError(f"{name} must have a row for each of final_index, got {len(getattr(self, name))}")

    def split(self, parts: int) -> list[Rollout]:
        """At most `parts` rollouts, split by environment; views, no copies."""
        return [self.slice_envs(low, high) for low, high in pairwise(split_edges(self.num_envs, parts))]

    def shuffled(
        self, net: nn.Module, indices: Sequence[Tensor], gamma: float, gae_lambda: float, reward_clip: float
    ) -> Iterator[ShuffledMinibatch]:
        """The decisions `t * N + n` of each of `indices [B]` as a minibatch, with their returns by `net` as it is now.

        For networks without an rnn_state. Each minibatch is copied when it is asked for.
        """
        returns = self.returns(net, gamma, gae_lambda, reward_clip).flatten()
        tensors = self.obs.flatten(0, 1), self.actions.flatten(), returns, self.log_probs.flatten()
        for index in indices:
            # obs[index] would copy number by number, and take much longer.
            yield ShuffledMinibatch(*(tensor.index_select(0, index) for tensor in tensors))

    def slice_envs(self, low: int, high: int) -> Rollout:
        """The environments `low <= n < high` of this rollout, as views."""
        n = self.final_index[:, 1]  # on the host, so that no mask is sought on a GPU
        mine = ((n >= low) & (n < high)).nonzero().squeeze(1)

        def part(tensor: Tensor, axes: str) -> Tensor:
            if "N" in axes:
                return tensor.narrow(axes.index("N"), low, high - low)
            rows = tensor.index_select(0, to_device(mine, tensor.device))
            return rows - torch.tensor([0, low]) if axes == "K2" else rows

        return Rollout(**{f.name: part(getattr(self, f.name), f.metadata["axes"]) for f in fields(Rollout)})

    @staticmethod
    def join(rollouts: Sequence[Rollout]) -> Rollout:
        """Rollouts of the same length side by side, as one: the inverse of `split`."""
        lows = accumulate((rollout.num_envs for rollout in rollouts[:-1]), initial=0)
        columns = [torch.tensor([0, low]) for low in lows]

        def joined(name: str, axes: str) -> Tensor:
            parts = [getattr(rollout, name) for rollout in rollouts]
            if axes == "K2":
                parts = [part + column for part, column in zip(parts, columns, strict=True)]
            return torch.cat(parts, dim=max(axes.find("N"), 0))

        return Rollout(**{f.name: joined(f.name, f.metadata["axes"]) for f in fields(Rollout)})

    def to(self, device: str | torch.device) -> Rollout:
        """The same rollout on `device`; what is read on the host stays there."""
        device = torch.device(device)
        moved = {f.name: to_device(getattr(self, f.name), device) for f in fields(Rollout) if not f.metadata["on_host"]}
        return replace(self, **moved)

    def batch(self, net: nn.Module, gamma: float, gae_lambda: float, reward_clip: float, off_policy: bool) -> Batch:
        """Forward pass on `[T, N]`, then the returns by its values, then one flatten.

        `off_policy`: the policy that acted was another, so the loss needs its log-probabilities.
        """
        logits, values = replay(net, self.obs, self.starts, self.rnn_state)  # [T, N, A], [T, N]
        valued = replace(self, values=values.detach().float())
        returns = valued.returns(net, gamma, gae_lambda, reward_clip)  # [T, N]
        behaviour = self.log_probs.flatten() if off_policy else None
        return Batch(logits.flatten(0, 1), values.flatten(), self.actions.flatten(), returns.flatten(), behaviour)

    def valued_by(self, net: nn.Module, parts: int, map_: Callable[..., Iterable[Tensor]]) -> Rollout:
        """A copy with the values of `net` as it is now; `map_` calls a function on parts, cut by environment."""

        @torch.no_grad()  # which holds for one thread: `map_` may use others
        def values_of(part: Rollout) -> Tensor:
            return replay(net, part.obs, part.starts, part.rnn_state)[1].float()  # [T, n]

        return replace(self, values=torch.cat([*map_(values_of, self.split(parts))], dim=1))

    @torch.no_grad()
    def returns(self, net: nn.Module, gamma: float, gae_lambda: float, reward_clip: float) -> Tensor:
        """The lambda-returns `[T, N]`; `net` values what follows the last step and the truncated ones."""
        after = torch.cat([self.next_obs, self.final_obs])  # [N + K, ...]
        rnn_state = torch.cat([self.next_rnn_state, self.final_rnn_state])
        starts = torch.zeros(len(after), dtype=torch.bool, device=after.device)  # no episode starts there
        bootstrap = flat_values(step(net, after, rnn_state, starts)[1], len(after))  # [N + K]
        next_values = torch.cat([self.values[1:], bootstrap[None, : self.num_envs]])  # [T, N]
        t, n = to_device(self.final_index.T, after.device).unbind()
        next_values[t, n] = bootstrap[self.num_envs :]
        rewards = self.rewards.clamp(-reward_clip, reward_clip) if reward_clip else self.rewards
        flags = self.terminated, self.truncated
        return lambda_returns(rewards, next_values, *flags, gamma=gamma, gae_lambda=gae_lambda)

    def __len__(self) -> int:
        return math.prod(self.actions.shape)


@dataclass
class ShuffledMinibatch:
    """A minibatch of single decisions, in any order, whose returns are known (see `Rollout.shuffled`)."""

    obs: Tensor  # [B, ...]
    actions: Tensor  # [B] int64
    returns: Tensor  # [B] float32
    log_probs: Tensor  # [B] float32, of the policy that acted

    def split(self, parts: int) -> list[ShuffledMinibatch]:
        """At most `parts` minibatches of almost equal size; views, no copies."""
        tensors = self.obs, self.actions, self.returns, self.log_probs
        pieces = zip(*(tensor.tensor_split(min(parts, len(self))) for tensor in tensors), strict=True)
        return [ShuffledMinibatch(*piece) for piece in pieces]

    def batch(self, net: nn.Module, gamma: float, gae_lambda: float, reward_clip: float, off_policy: bool) -> Batch:
        """Forward pass; discount, lambda and clip are in the returns already."""
        logits, values = net(self.obs)
        behaviour = self.log_probs if off_policy else None
        return Batch(logits, flat_values(values, len(self)), self.actions, self.returns, behaviour)

    def __len__(self) -> int:
        return len(self.actions)


class Batch(NamedTuple):
    """What the loss takes: the network's outputs, which carry the graph, and what they are compared with."""

    logits: Tensor  # [B, A]
    values: Tensor  # [B]
    actions: Tensor  # [B] int64
    returns: Tensor  # [B] float32
    behaviour_log_probs: Tensor | None = None  # [B] of the policy that acted, where it is not the one that learns


def split_edges(envs: int, parts: int) -> list[int]:
    """Where `envs` columns are cut into at most `parts` of almost equal size; part i: `edges[i]` to `edges[i + 1]`."""
    parts = min(parts, envs)
    return [-(-i * envs // parts) for i in range(parts + 1)]


def flat_values(values: Tensor, batch: int) -> Tensor:
    """The value head's output for `batch` observations as float32 `[B]`; ValueError for another shape."""
    if values.shape not in ((batch, 1), (batch,)):
        raise ValueError(f"net must give values of shape [{batch}, 1] or [{batch}], got {list(values.shape)}")
    return values.float().reshape(batch)

"""n-step transitions (`Experience`), and `unpack_batch`, which takes rollouts, too."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from a2c.rollout import Batch, Rollout, flat_values, split_edges


class Experience(NamedTuple):
    """An n-step transition: a decision, and what followed in a window of n decisions.

    `reward` is the discounted sum of the window's rewards; `last_state` is the observation
    after the window, None when the episode was terminated inside it. `reward_steps` is the number
    of decisions in the window; None stands for the `reward_steps` of `unpack_batch`, in
    `Transitions` for 1. A truncated episode ends in windows that are shorter than the others and
    still have a `last_state`.
    """

    state: Any
    action: int
    reward: float
    last_state: Any | None
    reward_steps: int | None = None


@dataclass
class Transitions:
    """A minibatch of n-step transitions."""

    items: Sequence[Experience]

    def split(self, parts: int) -> list[Transitions]:
        """At most `parts` minibatches of almost equal size."""
        return [Transitions(self.items[low:high]) for low, high in pairwise(split_edges(len(self.items), parts))]

    def batch(self, net: nn.Module, gamma: float, gae_lambda: float, reward_clip: float, off_policy: bool) -> Batch:
        """Forward pass and n-step returns; `reward` is a sum that was clipped already, and `gae_lambda` is 1."""
        device = next(net.parameters()).device
        states, actions, returns = _unpack_transitions(self.items, net, device, gamma, reward_steps=1)
        logits, values = net(states)
        return Batch(logits, flat_values(values, len(states)), actions, returns)

    def __len__(self) -> int:
        return len(self.items)


@torch.no_grad()
def unpack_batch(
    batch: Sequence[Any] | Rollout,
    net: nn.Module,
    device: str | torch.device = "cpu",
    *,
    gamma: float = 0.99,
    reward_steps: int = 4,
    gae_lambda: float = 1.0,
    reward_clip: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn experience into `(states, actions, returns)`: tensors of their own, none of which carries a graph.

    For transitions: `returns[b] = reward[b] + gamma^reward_steps * V(last_state[b])`, without
    the second term where `last_state` is None. For a `Rollout`: its lambda-returns (see
    `lambda_returns`), in the order of `[T, N]` flattened: decision (t, n) is row `t * N + n`. With `gae_lambda = 1`
    both forms give the same returns where the window of each transition runs to the end of the rollout or of
    its episode; windows of a fixed n give n-step returns instead.

    Args:
        batch: transitions with `state, action, reward, last_state` (`Experience` or any object
            with these attributes; arrays or tensors on any device), or a `Rollout`.
        net: network with outputs `(logits, values [B, 1] or [B])`; it values what comes after the windows.
            Inside a rollout `batch.values` are used, normally those of the policy that acted; they matter only
            where `gae_lambda` is below 1.
        device: of the results, and of `net`.
        gamma: discount per decision.
        reward_steps: decisions that the `reward` of a transition sums over (a rollout's
            window is its own length).
        gae_lambda: trace decay; transitions have none, so 1 is required there.
        reward_clip: bound on each reward of a rollout, 0 for none (a transition's reward is
            a sum already: clip it where it is summed).

    Returns:
        states `[B, ...]` in their own dtype, int64 actions `[B]`, float32 returns `[B]`.

    Raises:
        ValueError: an empty batch, `gamma` or `gae_lambda` outside 0 to 1, `reward_steps` that is not an integer
            or below 1, a negative `reward_clip`, transitions with a lambda below 1 or a clip, rewards that are NaN or
            infinite, actions that are not integers, states of different shapes, values of another shape, or a rollout
            whose `final_index` does not name its truncated steps.
    """
    if len(batch) == 0:
        raise ValueError("batch must hold at least 1 transition, got 0")
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must be at least 0 and at most 1, got {gamma}")
    if not reward_clip >= 0.0:
        raise ValueError(f"reward_clip must be at least 0, got {reward_clip}")
    reward_steps = _count(reward_steps)
    if isinstance(batch, Rollout):
        batch.check()
        _check_finite(batch.rewards)
        batch = batch.to(device)
        returns = batch.returns(net, gamma, gae_lambda, reward_clip).flatten()
        return batch.obs.flatten(0, 1).clone(), batch.actions.flatten().clone(), returns
    if gae_lambda != 1.0:
        raise ValueError(f"gae_lambda must be 1 for a list of transitions, got {gae_lambda}")
    if reward_clip:
        raise ValueError(f"reward_clip must be 0 for a list of transitions, whose rewards are sums, got {reward_clip}")
    _check_finite(torch.tensor([float(e.reward) for e in batch]))
    return _unpack_transitions(batch, net, device, gamma, reward_steps)


@torch.no_grad()
def _unpack_transitions(
    batch: Sequence[Any], net: nn.Module, device: str | torch.device, gamma: float, reward_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    own = [getattr(e, "reward_steps", None) for e in batch]
    lengths = [reward_steps if steps is None else _count(steps) for steps in own]
    states = _stack([e.state for e in batch]).to(device)
    actions = torch.tensor([_integer("action", e.action) for e in batch], dtype=torch.int64, device=device)
    returns = torch.tensor([float(e.reward) for e in batch], dtype=torch.float32, device=device)
    bootstrapped = [i for i, e in enumerate(batch) if e.last_state is not None]
    if bootstrapped:
        last_states = _stack([batch[i].last_state for i in bootstrapped]).to(device)
        discounts = torch.tensor([gamma ** lengths[i] for i in bootstrapped], dtype=torch.float32, device=device)
        returns[bootstrapped] += discounts * flat_values(net(last_states)[1], len(bootstrapped))
    return states, actions, returns


def _check_finite(rewards: Tensor) -> None:
    if not rewards.isfinite().all():
        raise ValueError(f"rewards must be finite, got {rewards[~rewards.isfinite()][0].item()}")


def _count(reward_steps: Any) -> int:
    steps = _integer("reward_steps", reward_steps)
    if steps < 1:
        raise ValueError(f"reward_steps must be at least 1, got {steps}")
    return steps


def _integer(name: str, value: Any) -> int:
    """An integer of Python, numpy or torch as an int; ValueError for what would have to be rounded."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value}") from None


def _stack(observations: list[Any]) -> Tensor:
    """Arrays or tensors as one tensor `[B, ...]`, on the device of the first tensor."""
    items = [o if isinstance(o, Tensor) else np.asarray(o) for o in observations]
    shapes = sorted({tuple(item.shape) for item in items})
    if len(shapes) > 1:
        raise ValueError(f"states must all have the same shape, got {list(shapes[0])} and {list(shapes[1])}")
    devices = [item.device for item in items if isinstance(item, Tensor)]
    if not devices:
        return torch.from_numpy(np.stack(items))
    return torch.stack([torch.as_tensor(item, device=devices[0]) for item in items])

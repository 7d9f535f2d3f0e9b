"""From experience to what the loss takes: bootstrapped returns, beside the network's outputs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from a2c.policy import replay, step
from a2c.returns import lambda_returns
from a2c.rollout import Rollout


class Experience(NamedTuple):
    """An n-step transition as notebooks have it.

    `reward` is the discounted sum of the window's rewards; `last_state` is the observation
    after the window, None when the episode ended inside it. `reward_steps` is set only for
    a window shorter than usual that still has a `last_state` (a truncated episode).
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
        size = -(-len(self.items) // parts)
        return [Transitions(self.items[i : i + size]) for i in range(0, len(self.items), size)]

    def policy_lag(self, updates: int) -> float:
        """0: their windows run on across updates, so no single policy acted in them."""
        return 0.0

    def __len__(self) -> int:
        return len(self.items)


class Batch(NamedTuple):
    """What the loss takes: the network's outputs, which carry the graph, and what they are compared with."""

    logits: Tensor  # [B, A]
    values: Tensor  # [B]
    actions: Tensor  # [B] int64
    returns: Tensor  # [B] float32
    behaviour_log_probs: Tensor | None = None  # [B] of the policy that acted, where it is not the one that learns


def rollout_batch(
    rollout: Rollout, net: nn.Module, *, gamma: float, gae_lambda: float, reward_clip: float, off_policy: bool
) -> Batch:
    """Forward pass on `[T, N]`, then the returns, then one flatten.

    `off_policy`: the network has moved since it acted, so the importance ratio needs the behaviour's probabilities.
    """
    logits, values = replay(net, rollout.obs, rollout.starts, rollout.rnn_state)  # [T, N, A], [T, N]
    returns = rollout_returns(rollout, net, gamma=gamma, gae_lambda=gae_lambda, reward_clip=reward_clip)  # [T, N]
    behaviour = rollout.log_probs.flatten() if off_policy else None
    return Batch(logits.flatten(0, 1), values.flatten(), rollout.actions.flatten(), returns.flatten(), behaviour)


def transition_batch(
    transitions: Sequence[Any], net: nn.Module, device: str | torch.device, *, gamma: float, reward_steps: int
) -> Batch:
    """Forward pass on the states of `transitions` and their n-step returns."""
    states, actions, returns = _unpack_transitions(transitions, net, device, gamma, reward_steps)
    logits, values = net(states)
    return Batch(logits, _flat(values, len(states)), actions, returns)


@torch.no_grad()
def rollout_returns(rollout: Rollout, net: nn.Module, *, gamma: float, gae_lambda: float, reward_clip: float) -> Tensor:
    """The lambda-returns `[T, N]` of a rollout; `net` values what follows its last step and its truncated ones."""
    envs = rollout.actions.shape[1]
    after = torch.cat([rollout.next_obs, rollout.final_obs])  # [N + K, ...]
    rnn_state = torch.cat([rollout.next_rnn_state, rollout.final_rnn_state])
    starts = torch.zeros(len(after), dtype=torch.bool, device=after.device)  # no episode starts there
    bootstrap = _flat(step(net, after, rnn_state, starts)[1], len(after))  # [N + K]
    next_values = torch.cat([rollout.values[1:], bootstrap[None, :envs]])  # [T, N]
    t, n = rollout.final_index.unbind(1)
    next_values[t, n] = bootstrap[envs:]
    rewards = rollout.rewards.clamp(-reward_clip, reward_clip) if reward_clip else rollout.rewards
    return lambda_returns(
        rewards, next_values, rollout.terminated, rollout.truncated, gamma=gamma, gae_lambda=gae_lambda
    )


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
    `lambda_returns`), environment after environment within each step. Both forms give the
    same numbers on the same experience with `gae_lambda = 1`.

    Args:
        batch: transitions with `state, action, reward, last_state` (`Experience` or any object
            with these attributes; arrays or tensors on any device), or a `Rollout`.
        net: network with outputs `(logits, values [B, 1] or [B])`; it values what comes after the windows.
            Inside them a rollout has the values of the policy that acted.
        device: where the results live.
        gamma: discount per decision.
        reward_steps: decisions that the `reward` of a transition sums over (a rollout's
            window is its own length).
        gae_lambda: trace decay; transitions have none, so 1 is required there.
        reward_clip: bound on each reward of a rollout, 0 for none (a transition's reward is
            a sum already: clip it where it is summed).

    Returns:
        states `[B, ...]` in their own dtype, int64 actions `[B]`, float32 returns `[B]`.

    Raises:
        ValueError: an empty batch, `gamma` or `gae_lambda` outside 0 to 1, `reward_steps` that is no integer
            or below 1, a negative `reward_clip`, lambda below 1 for transitions, rewards that are NaN or infinite,
            actions that are no integers, states of different shapes, values of another shape, or a rollout whose
            `final_index` does not name its truncated steps.
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
        returns = rollout_returns(batch, net, gamma=gamma, gae_lambda=gae_lambda, reward_clip=reward_clip)
        return batch.obs.flatten(0, 1).clone(), batch.actions.flatten().clone(), returns.flatten()
    if gae_lambda != 1.0:
        raise ValueError(f"gae_lambda must be 1 for a list of transitions, got {gae_lambda}")
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
    alive = [i for i, e in enumerate(batch) if e.last_state is not None]
    if alive:
        last_states = _stack([batch[i].last_state for i in alive]).to(device)
        discounts = torch.tensor([gamma ** lengths[i] for i in alive], dtype=torch.float32, device=device)
        returns[alive] += discounts * _flat(net(last_states)[1], len(alive))
    return states, actions, returns


def _check_finite(rewards: Tensor) -> None:
    if not rewards.isfinite().all():
        raise ValueError(f"rewards must be finite, got {rewards[~rewards.isfinite()][0].item()}")


def _flat(values: Tensor, batch: int) -> Tensor:
    """The value head's output for `batch` observations as float32 `[B]`."""
    if values.shape not in ((batch, 1), (batch,)):
        raise ValueError(f"net must give values of shape [{batch}, 1] or [{batch}], got {list(values.shape)}")
    return values.float().reshape(batch)


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

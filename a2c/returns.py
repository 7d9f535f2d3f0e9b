"""Returns: the targets of the value head. Return minus predicted value is the advantage.

Pure mathematics on `[T, N]` tensors; this file imports nothing from the package.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lambda_returns(
    rewards: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float = 0.99,
    gae_lambda: float = 1.0,
) -> Tensor:
    """The lambda-return of every step of a rollout.

    ::

        G[t]  = r[t] + gamma * V'[t]                                         where the episode ended
        G[t]  = r[t] + gamma * ((1 - lambda) * V'[t] + lambda * G[t + 1])    elsewhere
        V'[t] = 0 where terminated, else next_values[t];  G[T] = V'[T - 1]

    lambda = 1 is the longest n-step return that the rollout allows, lambda = 0 is TD(0), and `G - V` is the generalised
    advantage estimate. Sources: Sutton & Barto (2018), equation 12.18; Schulman et al.
    (2016), "High-dimensional continuous control using generalized advantage
    estimation", section 3.

    Args:
        rewards: `[T, N]` float, reward of the decision taken at t.
        next_values: `[T, N]` float, V of the true successor of step t: of the next
            observation, or of the final observation where the episode was truncated.
        terminated: `[T, N]` bool, the episode ended at t by its own rules: no bootstrap.
        truncated: `[T, N]` bool, the episode was cut off at t: bootstrap, then stop.
        gamma: discount per decision, 0 to 1.
        gae_lambda: trace decay, 0 to 1.

    Returns:
        `[T, N]` returns, in the dtype of `next_values`.

    Raises:
        ValueError: shapes differ or are not `[T, N]` with T > 0, flags are not bool, values are not
            floating point, or a coefficient lies outside 0 to 1.
    """
    _check(rewards, next_values, terminated, truncated, gamma, gae_lambda)
    bootstrap = torch.where(terminated, torch.zeros_like(next_values), next_values)  # [T, N]
    ended = terminated | truncated
    # G[t] = near[t] + gamma * lambda * G[t + 1]; all but this recursion is done for the whole rollout at once.
    near = rewards + gamma * torch.where(ended, bootstrap, (1.0 - gae_lambda) * bootstrap)  # [T, N]
    tail = bootstrap[-1]  # [N]
    returns = []
    for here, over in zip(reversed(near.unbind()), reversed(ended.unbind()), strict=True):
        tail = torch.where(over, here, torch.add(here, tail, alpha=gamma * gae_lambda))
        returns.append(tail)
    return torch.stack(returns[::-1]).to(next_values.dtype)


def _check(
    rewards: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, gae_lambda: float
) -> None:
    if rewards.ndim != 2 or len(rewards) == 0:
        raise ValueError(f"rewards must have shape [T, N] with T > 0, got {list(rewards.shape)}")
    for name, tensor in (("next_values", next_values), ("terminated", terminated), ("truncated", truncated)):
        if tensor.shape != rewards.shape:
            raise ValueError(f"{name} must have the shape of rewards {list(rewards.shape)}, got {list(tensor.shape)}")
    if not next_values.is_floating_point():
        raise ValueError(f"next_values must be floating point, got {next_values.dtype}")
    for name, flags in (("terminated", terminated), ("truncated", truncated)):
        if flags.dtype != torch.bool:
            raise ValueError(f"{name} must be bool, got {flags.dtype}")
    for name, value in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must be at least 0 and at most 1, got {value}")

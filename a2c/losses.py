"""The one objective that every algorithm minimises.

Pure mathematics on `[B]` tensors; this file imports nothing from the package.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class A2CLoss(NamedTuple):
    """Terms of the loss, all scalar tensors, means over the batch. `total` carries the graph."""

    total: Tensor  # policy + value_coef * value - entropy_coef * entropy
    policy: Tensor  # policy gradient term
    value: Tensor  # mean squared error of the value head (squared return)
    entropy: Tensor  # of the policy (nats)
    advantage: Tensor  # mean of return - value (return)
    ratio: Tensor  # mean importance ratio, clipped at 1
    approx_kl: Tensor  # estimate of KL(behaviour, pi) from the actions taken (nats); 0 without behaviour_log_probs
    clip_fraction: Tensor  # share of samples whose importance ratio was clipped at 1; 0 without behaviour_log_probs


def a2c_loss(
    logits: Tensor,
    values: Tensor,
    actions: Tensor,
    returns: Tensor,
    *,
    entropy_coef: float | Tensor = 0.01,
    value_coef: float = 0.5,
    log_eps: float = 0.0,
    behaviour_log_probs: Tensor | None = None,
    targets: Tensor | None = None,
) -> A2CLoss:
    """Advantage actor-critic loss of a batch, with its terms.

    ::

        adv   = returns - stop_gradient(V)
        total = -mean(rho * adv * log(pi(a) + log_eps))
                + value_coef * mean((returns - V)^2) - entropy_coef * mean(H(pi))
        rho   = min(1, pi(a) / behaviour(a)), a constant; 1 without behaviour_log_probs

    Sources: Mnih et al. (2016), "Asynchronous methods for deep reinforcement learning",
    section 4 and algorithm S3; the clipped ratio is V-trace's (Espeholt et al., 2018,
    sections 4.1 and 4.2) with rho-bar = 1; log_eps is GA3C's guard (Babaeizadeh et al., 2017, section 5.3):
    the gradient of an action fades if the policy has abandoned it since it was taken.
    If a masked action was taken, the loss without log_eps is infinite (NaN with behaviour_log_probs) though its
    gradients are finite.

    Args:
        logits: `[B, A]` unnormalised log-probabilities; minus infinity masks an action that was not taken.
        values: `[B, 1]` (or `[B]`) outputs of the value head.
        actions: `[B]` actions taken, of any integer dtype.
        returns: `[B]` float returns; they carry no gradient.
        entropy_coef: weight of the entropy bonus, a number or a scalar tensor.
        value_coef: weight of the squared value error.
        log_eps: probability added inside the logarithm.
        behaviour_log_probs: `[B]` log-probability of each action when it was taken, if
            another policy took it.

    Raises:
        ValueError: logits that are not `[B, A]` with B > 0, shapes that would broadcast instead of pairing element by
            element, or actions that are not integers.
    """
    if logits.ndim != 2 or len(logits) == 0:
        raise ValueError(f"logits must have shape [B, A] with B > 0, got {list(logits.shape)}")
    batch = len(logits)
    if values.shape == (batch, 1):
        values = values.squeeze(1)
    named = {"values": values, "actions": actions, "returns": returns, "behaviour_log_probs": behaviour_log_probs}
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != (batch,):
            raise ValueError(f"{name} must have shape [{batch}], got {list(tensor.shape)}")
    if actions.is_floating_point() or actions.is_complex() or actions.dtype == torch.bool:
        raise ValueError(f"actions must be integers, got {actions.dtype}")
    logits, values, returns = logits.float(), values.float(), returns.detach()
    log_probs = F.log_softmax(logits, dim=1)  # [B, A]
    log_prob = log_probs.gather(1, actions.long().unsqueeze(1)).squeeze(1)  # [B]
    advantage = returns - values.detach()  # [B]
    assert advantage.shape == log_prob.shape
    log_ratio = torch.zeros_like(log_prob)
    if behaviour_log_probs is not None:
        log_ratio = log_prob.detach() - behaviour_log_probs.detach()
    unclipped = log_ratio.exp()
    ratio = unclipped.clamp(max=1.0)
    approx_kl = (unclipped - 1 - log_ratio).mean()  # Schulman (2020), "Approximating KL divergence", k3
    clip_fraction = (unclipped > 1.0).float().mean()
    guarded = torch.log(log_prob.exp() + log_eps) if log_eps else log_prob
    policy = -(ratio * advantage * guarded).mean()
    value = F.mse_loss(values, returns if targets is None else targets)
    # 0 * log 0 = 0, and no gradient: the bound is far below where the exponential becomes 0.
    entropy = -(log_probs.exp() * log_probs.clamp(min=-1e4)).sum(dim=1).mean()
    total = policy + value_coef * value - entropy_coef * entropy
    terms = (policy.detach(), value.detach(), entropy.detach(), advantage.mean(), ratio.mean())
    return A2CLoss(total, *terms, approx_kl, clip_fraction)

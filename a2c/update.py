"""One clipped optimiser step: gradients, clipping, step; and its metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from a2c.compute.compute import Compute
from a2c.compute.ranks import Ranks
from a2c.config.config import Config
from a2c.losses import A2CLoss, a2c_loss
from a2c.rollout import Batch


class Minibatch(Protocol):
    """What one step learns from: a `Rollout`, a `ShuffledMinibatch`, or the `Transitions` of `--sliding-batch`."""

    def split(self, parts: int) -> Sequence[Minibatch]:
        """At most `parts` minibatches of almost equal size."""

    def batch(self, net: nn.Module, gamma: float, gae_lambda: float, reward_clip: float, off_policy: bool) -> Batch:
        """Forward pass and returns."""

    def __len__(self) -> int: ...


Gradients = Sequence[Sequence[Tensor]]  # for each parameter one of each shard; their sum is the gradient


class Terms(NamedTuple):
    """The loss of one step and what it was made of: means over the minibatch, scalars."""

    loss: A2CLoss
    returns: Tensor
    squared_returns: Tensor
    values: Tensor


def compute_gradients(
    net: nn.Module,
    minibatch: Minibatch,
    config: Config,
    compute: Compute,
    off_policy: bool,
    entropy_coef: float | Tensor,
) -> tuple[Gradients, Terms]:
    """The gradients of the loss of `minibatch` with respect to `trainable_parameters(net)`, and the terms of that loss.

    `off_policy`: the policy that acted was another, older or with noise; then each sample of a rollout is weighted by
    its importance ratio, clipped at 1. `entropy_coef`: the schedule's present value. The minibatch is split into
    shards, at most one per compute thread, each weighted by its share of the samples: their sum is the gradient of the
    whole minibatch's mean loss. All is 0 where there are no samples: other ranks have them all.
    """
    if not len(minibatch):
        zero = torch.zeros((), device=compute.device)
        loss = A2CLoss(*[zero] * len(A2CLoss._fields))
        return [(torch.zeros_like(one),) for one in trainable_parameters(net)], Terms(loss, zero, zero, zero)
    shards = minibatch.split(compute.shards(len(minibatch)))
    weights = [len(shard) / len(minibatch) for shard in shards]

    def learn(shard: Minibatch, weight: float) -> tuple[tuple[Tensor, ...], Terms]:
        """Gradients, times `weight`, and terms of a shard's mean loss. Several threads call it: `.grad` stays as is."""
        batch = shard.batch(net, config.gamma, config.gae_lambda, config.reward_clip, off_policy)
        loss = a2c_loss(
            batch.logits,
            batch.values,
            batch.actions,
            batch.returns,
            entropy_coef=entropy_coef,
            value_coef=config.value_coef,
            log_eps=config.log_eps or 0.0,
            behaviour_log_probs=batch.behaviour_log_probs,
        )
        gradients = torch.autograd.grad(loss.total * weight, trainable_parameters(net), materialize_grads=True)
        detached = loss._replace(total=loss.total.detach())
        returns, values = batch.returns.double(), batch.values.detach().float()  # double: see `explained_variance`
        return gradients, Terms(detached, returns.mean(), returns.square().mean(), values.mean())

    # The gradients of a single shard are computed here: what another thread does would not be part of a captured graph.
    results = compute.map(learn, shards, weights) if len(shards) > 1 else [learn(shards[0], weights[0])]

    def mean(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([value * weight for value, weight in zip(values, weights, strict=True)]).sum()

    gradients, terms = zip(*results, strict=True)
    losses, *others = zip(*terms, strict=True)
    loss = A2CLoss(*(mean(values) for values in zip(*losses, strict=True)))
    return list(zip(*gradients, strict=True)), Terms(loss, *map(mean, others))


def trainable_parameters(net: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn: a network of one's own may hold others, with `requires_grad` off."""
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


def sum_gradients(net: nn.Module, gradients: Gradients, terms: Terms, ranks: Ranks, share: float = 1.0) -> Terms:
    """Set `.grad` to the sum over all shards of all ranks; returns the terms of the whole minibatch.

    `terms`: of this rank's samples; `share`: the part of the minibatch that these are.
    """
    for parameter, (first, *others) in zip(trainable_parameters(net), gradients, strict=True):
        if parameter.grad is None:  # kept from then on: fresh memory costs more than the sum
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(first)
        for gradient in others:
            parameter.grad.add_(gradient)
    return _sum_over_ranks(net, terms, ranks, share) if ranks.size > 1 else terms


def _sum_over_ranks(net: nn.Module, terms: Terms, ranks: Ranks, share: float) -> Terms:
    """One all-reduce of everything, gradients and terms, as one vector."""
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    tensors = [*gradients, *terms.loss, *terms[1:]]
    flat = ranks.all_reduce(torch.cat([tensor.float().flatten() for tensor in tensors]).mul_(share))
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    sums = [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
    torch._foreach_copy_(gradients, sums[: len(gradients)])
    loss, others = sums[len(gradients) : -3], sums[-3:]
    return Terms(A2CLoss(*loss), *others)


def clipped_step(net: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> Tensor:
    """Clip the gradients of all parameters together to the L2 norm `max_grad_norm` (0: no clipping) and take a step.

    Returns the norm before clipping.
    """
    norm = nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm or math.inf)
    optimizer.step()
    return norm


def check_steps(done: Sequence[tuple[Terms, Tensor]], net: nn.Module, updates: int) -> None:
    """Raise FloatingPointError if a loss, a gradient's norm or a parameter of `net` is NaN or infinite.

    The message names the first bad loss or norm and its update; parameters are looked at only after the last update,
    number `updates`. One copy to the host for all of them.
    """
    if not done:
        return
    sizes = [size for terms, norm in done for size in (terms.loss.total, norm)]
    sizes += torch._foreach_norm(list(net.parameters()))
    if torch.stack([size.detach() for size in sizes]).isfinite().all():
        return
    for number, (terms, norm) in enumerate(done, start=updates - len(done) + 1):
        losses = {f"{name} loss": getattr(terms.loss, name) for name in ("policy", "value", "total")}
        for name, value in {**losses, "gradient's norm": norm}.items():
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the {name} is {float(value)} at update {number}; the last checkpoint is kept: "
                    "try a lower learning_rate, or smaller rewards (reward_clip); none may be NaN"
                )
    raise FloatingPointError(
        f"the network's parameters are NaN or infinite after update {number}; the last checkpoint is kept: "
        "try a lower learning_rate or a larger adam_eps or rmsprop_eps"
    )


def describe_update(
    terms: Terms, grad_norm: Tensor, net: nn.Module, max_grad_norm: float, entropy_coef: float
) -> dict[str, float]:
    """Metrics of an update whose gradients `net` still holds (see `METRICS`); floats, copied from the device."""
    norm, loss = float(grad_norm), terms.loss
    entries = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    undo_clip = max(1.0, norm / (max_grad_norm or math.inf))  # the metrics are of the gradient before clipping
    return {
        "advantage": float(loss.advantage),
        "values": float(terms.values),
        "batch_rewards": float(terms.returns),
        "loss_entropy": -entropy_coef * float(loss.entropy),
        "loss_policy": float(loss.policy),
        "loss_value": float(loss.value),
        "loss_total": float(loss.total),
        "entropy": float(loss.entropy),
        "ratio": float(loss.ratio),
        "approx_kl": float(loss.approx_kl),
        "clip_fraction": float(loss.clip_fraction),
        "explained_variance": explained_variance(terms),
        "grad_l2": norm,
        "grad_max": float(entries.abs().max()) * undo_clip,
        "grad_var": float(entries.var(unbiased=False)) * undo_clip**2,
    }


def explained_variance(terms: Terms) -> float:
    """Share of the variance of a minibatch's returns that the value head explains; NaN if they are (nearly) equal."""
    returns, squared, error = float(terms.returns), float(terms.squared_returns), float(terms.loss.value)
    variance, unexplained = squared - returns**2, error - float(terms.loss.advantage) ** 2
    rounding = 1e-5 * error + 100 * torch.finfo(terms.squared_returns.dtype).eps * squared  # the loss is in float32
    return 1.0 - unexplained / variance if variance > rounding else math.nan

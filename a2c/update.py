"""One clipped optimiser step on one batch: gradients, clip, step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from a2c.batch import Experience, unpack_views
from a2c.compute import Compute, refresh
from a2c.config import Config
from a2c.losses import A2CLoss, a2c_loss
from a2c.recurrent import replay
from a2c.rollout import Rollout

Batch = Rollout | Sequence[Experience]


class Update(NamedTuple):
    """What one step did: the loss, batch means of return and value, the gradient norm before the clip."""

    loss: A2CLoss
    returns: Tensor
    values: Tensor
    grad_norm: Tensor


def learn(
    net: nn.Module,
    twin: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: Config,
    compute: Compute,
    moved: bool = True,
) -> Update:
    """Take one optimiser step on `batch` and report it.

    `moved` says that the policy has learned since it acted in `batch`: then each sample of a
    rollout is weighted by its importance ratio, clipped at 1.

    The batch is learned in shards, one per compute thread, whose gradients are summed with
    their share of the samples as weight: the gradient of the whole batch's mean loss. `twin`
    is the working copy of `net` (see `Compute.working_copy`) and is brought up to date.
    """
    parts = shard(batch, compute)
    shares = [len(part) / len(batch) for part in parts]
    results = compute.map(lambda part, share: _gradients(twin, part, share, config, compute, moved), parts, shares)
    parameters = list(net.parameters())
    for parameter, *gradients in zip(parameters, *(r[0] for r in results), strict=True):
        if parameter.grad is None:  # kept from then on: fresh memory costs more than the sum
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(gradients[0])
        for gradient in gradients[1:]:
            parameter.grad.add_(gradient)
    grad_norm = nn.utils.clip_grad_norm_(parameters, config.max_grad_norm or math.inf)
    optimizer.step()
    refresh(twin, net)

    def mean(terms: Sequence[Tensor]) -> Tensor:
        return torch.stack([term * share for term, share in zip(terms, shares, strict=True)]).sum()

    loss = A2CLoss(*(mean(terms) for terms in zip(*(r[1] for r in results), strict=True)))
    return Update(loss, mean([r[2] for r in results]), mean([r[3] for r in results]), grad_norm)


def shard(batch: Batch, compute: Compute) -> Sequence[Batch]:
    """Cut a batch for the compute threads: a rollout by environment, transitions by count."""
    parts = compute.shards(len(batch))
    if isinstance(batch, Rollout):
        return batch.split(parts)
    size = -(-len(batch) // parts)
    return [batch[i : i + size] for i in range(0, len(batch), size)]


def _gradients(
    net: nn.Module, batch: Batch, share: float, config: Config, compute: Compute, moved: bool
) -> tuple[tuple[Tensor, ...], A2CLoss, Tensor, Tensor]:
    """Gradients, times `share`, and terms of the mean loss of one shard; touches no `.grad`: threads may meet here."""
    states, actions, returns = unpack_views(
        batch,
        net,
        compute.device,
        gamma=config.gamma,
        reward_steps=config.rollout_steps,
        gae_lambda=config.gae_lambda,
        reward_clip=config.reward_clip,
    )
    if isinstance(batch, Rollout):
        obs = states.view(*batch.actions.shape, *states.shape[1:])
        logits, values = replay(net, obs, batch.starts.to(compute.device), batch.memory.to(compute.device))
    else:
        logits, values = net(states)
    behaviour = None
    if moved and isinstance(batch, Rollout):
        behaviour = batch.log_probs.flatten().to(compute.device)
    loss = a2c_loss(
        logits,
        values,
        actions,
        returns,
        entropy_coef=config.entropy_coef,
        value_coef=config.value_coef,
        log_eps=config.log_eps or 0.0,
        behaviour_log_probs=behaviour,
    )
    gradients = torch.autograd.grad(loss.total * share, list(net.parameters()))
    detached = loss._replace(total=loss.total.detach())
    return gradients, detached, returns.mean(), values.detach().float().mean()


def learning_metrics(update: Update, net: nn.Module, config: Config) -> dict[str, float]:
    """Metrics of the newest update (host copies: call it once per logged row, not per update)."""
    norm = float(update.grad_norm)
    entries = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    undo_clip = max(1.0, norm / (config.max_grad_norm or math.inf))
    return {
        "advantage": float(update.loss.advantage),
        "values": float(update.values),
        "batch_rewards": float(update.returns),
        "loss_entropy": -config.entropy_coef * float(update.loss.entropy),
        "loss_policy": float(update.loss.policy),
        "loss_value": float(update.loss.value),
        "loss_total": float(update.loss.total),
        "entropy": float(update.loss.entropy),
        "ratio": float(update.loss.ratio),
        "grad_l2": norm,
        "grad_max": float(entries.abs().max()) * undo_clip,
        "grad_var": float(entries.var(unbiased=False)) * undo_clip**2,
    }

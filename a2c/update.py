"""One clipped optimiser step: gradients, clip, step; and the rule of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from a2c.batch import Batch, Transitions, rollout_batch, transition_batch
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.losses import A2CLoss, a2c_loss
from a2c.rollout import Rollout

Minibatch = Rollout | Transitions


class Gradients(NamedTuple):
    """Gradients of a minibatch's mean loss, in the order of the parameters, and its terms (batch means)."""

    gradients: Sequence[Sequence[Tensor]]  # per parameter one of each shard; their sum is the gradient
    loss: A2CLoss
    returns: Tensor
    values: Tensor


def compute_gradients(
    net: nn.Module, minibatch: Minibatch, config: Config, compute: Compute, off_policy: bool
) -> Gradients:
    """Differentiate the loss of `minibatch` by the parameters of `net`.

    `off_policy`: the policy has learned since it acted; then each sample of a rollout is weighted by its importance
    ratio, clipped at 1. The minibatch is learned in shards, one per compute thread, each weighted by its share of
    the samples, so that the sum is the gradient of the whole minibatch's mean loss.
    """
    shards = minibatch.split(compute.shards(len(minibatch)))
    shares = [len(shard) / len(minibatch) for shard in shards]
    results = compute.map(
        lambda shard, share: _shard_gradients(net, shard, share, config, compute, off_policy), shards, shares
    )

    def mean(terms: Sequence[Tensor]) -> Tensor:
        return torch.stack([term * share for term, share in zip(terms, shares, strict=True)]).sum()

    gradients, losses, returns, values = zip(*results, strict=True)
    loss = A2CLoss(*(mean(terms) for terms in zip(*losses, strict=True)))
    return Gradients(list(zip(*gradients, strict=True)), loss, mean(returns), mean(values))


def _shard_gradients(
    net: nn.Module, shard: Minibatch, share: float, config: Config, compute: Compute, off_policy: bool
) -> tuple[tuple[Tensor, ...], A2CLoss, Tensor, Tensor]:
    """Gradients, times `share`, and terms of the mean loss of one shard; touches no `.grad`: threads may meet here."""
    batch = make_batch(net, shard, config, compute, off_policy)
    loss = a2c_loss(
        batch.logits,
        batch.values,
        batch.actions,
        batch.returns,
        entropy_coef=config.entropy_coef,
        value_coef=config.value_coef,
        log_eps=config.log_eps or 0.0,
        behaviour_log_probs=batch.behaviour_log_probs,
    )
    gradients = torch.autograd.grad(loss.total * share, list(net.parameters()))
    detached = loss._replace(total=loss.total.detach())
    return gradients, detached, batch.returns.mean(), batch.values.detach().float().mean()


def make_batch(net: nn.Module, shard: Minibatch, config: Config, compute: Compute, off_policy: bool) -> Batch:
    """The outputs of `net` and the returns of a shard."""
    if isinstance(shard, Transitions):
        return transition_batch(shard.items, net, compute.device, gamma=config.gamma, reward_steps=config.rollout_steps)
    return rollout_batch(
        shard,
        net,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        reward_clip=config.reward_clip,
        off_policy=off_policy,
    )


def clipped_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, gradients: Sequence[Sequence[Tensor]], max_grad_norm: float
) -> Tensor:
    """Sum the shards' gradients, clip them to the L2 norm `max_grad_norm` (0: no clip), step; the norm before."""
    parameters = list(net.parameters())
    for parameter, (first, *others) in zip(parameters, gradients, strict=True):
        if parameter.grad is None:  # kept from then on: fresh memory costs more than the sum
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(first)
        for gradient in others:
            parameter.grad.add_(gradient)
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)
    optimizer.step()
    return norm


def make_optimizer(net: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimiser that the config names, its moments at zero.

    Adam (Kingma & Ba, 2015, algorithm 1), one fused kernel; RMSprop (Tieleman & Hinton, 2012, lecture 6e) without
    momentum or centring, as A3C took it (Mnih et al., 2016, supplement, section 8).
    """
    parameters = list(net.parameters())
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, lr=config.learning_rate, eps=config.adam_eps, fused=True)
        moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    else:
        kind = InsideRMSprop if config.rmsprop_eps_inside else torch.optim.RMSprop
        optimizer = kind(parameters, lr=config.learning_rate, alpha=config.rmsprop_decay, eps=config.rmsprop_eps)
        moments = ("square_avg",)
    for parameter in parameters:  # torch would make them at the first step: too late to share or to compare them
        step = torch.zeros((), device=parameter.device if config.optimizer == "adam" else "cpu")
        optimizer.state[parameter] = {"step": step, **{name: torch.zeros_like(parameter) for name in moments}}
    return optimizer


class InsideRMSprop(torch.optim.RMSprop):
    """RMSprop with epsilon under the root: `p -= lr * g / sqrt(mean(g^2) + eps)`; torch adds it outside."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step along the parameters' gradients."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in parameters]
            squares = [self.state[p]["square_avg"] for p in parameters]
            torch._foreach_mul_(squares, group["alpha"])
            torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - group["alpha"])
            roots = torch._foreach_sqrt(torch._foreach_add(squares, group["eps"]))
            torch._foreach_addcdiv_(parameters, gradients, roots, -group["lr"])
            torch._foreach_add_([self.state[p]["step"] for p in parameters], 1.0)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take moments back into the tensors that hold them; the settings of this run hold, not those of the last.

    ValueError where they do not fit the network or the optimiser.
    """
    saved = [state["state"].get(i) for i in range(len(state["state"]))]
    moments = list(optimizer.state.values())
    shapes = [{name: value.shape for name, value in one.items()} for one in moments]
    if shapes != [one and {name: value.shape for name, value in one.items()} for one in saved]:
        raise ValueError("the optimiser's moments do not fit the network")
    for mine, theirs in zip(moments, saved, strict=True):
        for name, value in mine.items():
            value.copy_(theirs[name])


def learning_rate(config: Config, env_steps: int) -> float:
    """The learning rate after `env_steps` decisions: constant, or linear to zero at the end."""
    if not config.lr_decay:
        return config.learning_rate
    return config.learning_rate * max(0.0, 1.0 - env_steps / config.total_env_steps)

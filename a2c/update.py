"""One clipped optimiser step on one batch: gradients, clip, step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from a2c.batch import Experience, unpack_views
from a2c.compute.compute import Compute
from a2c.compute.replica import sync_replica
from a2c.config.config import Config
from a2c.losses import A2CLoss, a2c_loss
from a2c.policy import replay
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
    replica: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: Config,
    compute: Compute,
    off_policy: bool = True,
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
    results = compute.map(
        lambda part, share: _gradients(replica, part, share, config, compute, off_policy), parts, shares
    )
    parameters = list(net.parameters())
    for parameter, *gradients in zip(parameters, *(r[0] for r in results), strict=True):
        if parameter.grad is None:  # kept from then on: fresh memory costs more than the sum
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(gradients[0])
        for gradient in gradients[1:]:
            parameter.grad.add_(gradient)
    grad_norm = nn.utils.clip_grad_norm_(parameters, config.max_grad_norm or math.inf)
    optimizer.step()
    sync_replica(replica, net)

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
    net: nn.Module, batch: Batch, share: float, config: Config, compute: Compute, off_policy: bool
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
        logits, values = replay(net, obs, batch.starts.to(compute.device), batch.rnn_state.to(compute.device))
    else:
        logits, values = net(states)
    behaviour = None
    if off_policy and isinstance(batch, Rollout):
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

"""The optimisers: Adam and RMSprop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from a2c.config.config import Config


def make_optimizer(net: nn.Module, config: Config, replayed: bool = False) -> torch.optim.Optimizer:
    """The optimiser that `config.optimizer` names, its moments at zero.

    `replayed`: for CUDA graphs, which read Adam's learning rate from a tensor.

    Adam (Kingma & Ba, 2015, algorithm 1), one fused kernel; RMSprop (Tieleman & Hinton, 2012, lecture 6e) without
    momentum or centring; A3C's has epsilon under the root (Mnih et al., 2016, section 4, "Optimization").
    """
    parameters = list(net.parameters())
    optimizer: torch.optim.Optimizer
    if config.optimizer == "adam":
        lr = _replayed_rate(config.learning_rate, parameters[0].device) if replayed else config.learning_rate
        capturable = replayed and parameters[0].is_cuda
        optimizer = torch.optim.Adam(parameters, lr=lr, eps=config.adam_eps, fused=True, capturable=capturable)
        moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    else:
        kind = InsideRMSprop if config.rmsprop_eps_inside else torch.optim.RMSprop
        optimizer = kind(parameters, lr=config.learning_rate, alpha=config.rmsprop_decay, eps=config.rmsprop_eps)
        moments = ("square_avg",)
    for parameter in parameters:  # torch would make them at the first step: too late to share or to compare them
        step = torch.zeros((), device=parameter.device if config.optimizer == "adam" else "cpu")
        optimizer.state[parameter] = {"step": step, **{name: torch.zeros_like(parameter) for name in moments}}
    return optimizer


def _replayed_rate(rate: float, device: torch.device) -> Tensor:
    """The learning rate where a replayed step can read it: rounded to float32 on a GPU, whose kernel asks for that."""
    return torch.full((), rate, dtype=torch.float32 if device.type == "cuda" else torch.float64, device=device)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let the next steps have the learning rate `rate`; where it is a tensor, the tensor stays the same one."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


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
    """Copy saved moments into the tensors of `optimizer`, which keeps its own settings.

    ValueError if they do not fit the network or the optimiser.
    """
    saved = [state["state"].get(i) for i in range(len(state["state"]))]
    moments = list(optimizer.state.values())
    shapes = [{name: value.shape for name, value in one.items()} for one in moments]
    if shapes != [one and {name: value.shape for name, value in one.items()} for one in saved]:
        raise ValueError("the optimiser's moments do not fit the network")
    for mine, theirs in zip(moments, saved, strict=True):
        for name, value in mine.items():
            value.copy_(theirs[name])

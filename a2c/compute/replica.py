"""Copies of a network that act and learn in their own precision."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def refresh(twin: nn.Module, net: nn.Module) -> None:
    """Give the working copy the parameters that `net` has now, and its statistics where it has its own."""
    if twin is not net:
        torch._foreach_copy_(list(twin.parameters()), list(net.parameters()))
        for mine, theirs in zip(twin.buffers(), net.buffers(), strict=True):
            if mine is not theirs:
                mine.copy_(theirs)

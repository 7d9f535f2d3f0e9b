"""Replicas: copies of a network that act and learn in the precision of the run; the optimiser changes the original."""

from __future__ import annotations

import copy

import torch
from torch import nn

from a2c.compute.compute import Compute


def make_replica(net: nn.Module, compute: Compute, always_copy: bool = False) -> nn.Module:
    """The network that acts and learns: `net` itself in float32, else a copy with parameters in `compute.precision`.

    The optimiser changes the float32 parameters of `net`, and checkpoints hold them; `sync_replica` copies them.
    Layers with `keeps_float32` and the buffers of the normaliser, which are shared, stay as they are.
    `always_copy`: a copy in float32 too, because other processes change the parameters of `net`.
    """
    net.to(compute.device)
    if compute.precision == torch.float32 and not always_copy:
        return net
    normalizer = getattr(net, "normalizer", None)
    shared = isinstance(normalizer, nn.Module) and not list(normalizer.parameters())  # statistics, nothing learned
    replica = copy.deepcopy(net, {id(normalizer): normalizer} if shared else None)  # wherever `net` holds it
    return in_precision(replica, compute.precision)


def in_precision(net: nn.Module, precision: torch.dtype) -> nn.Module:
    """`net` itself, with its parameters in `precision`, but for those of layers with `keeps_float32`."""
    for module in net.modules():
        if not getattr(module, "keeps_float32", False):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(precision)
    return net


def with_own_statistics(net: nn.Module) -> nn.Module:
    """`net` with a copy of its normaliser, wherever it holds it; parameters and other buffers are the same tensors."""
    same = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    for statistics in net.get_submodule("normalizer").buffers():
        same.pop(id(statistics), None)  # a normaliser that is no layer has buffers that are not the network's
    return copy.deepcopy(net, same)


@torch.no_grad()
def sync_replica(replica: nn.Module, net: nn.Module) -> None:
    """Give `replica` the parameters that `net` has now, and its statistics where it has its own."""
    torch._foreach_copy_(list(replica.parameters()), list(net.parameters()))
    copy_buffers(replica, net)


@torch.no_grad()
def copy_buffers(target: nn.Module, source: nn.Module) -> None:
    """Give `target` the buffers of `source`, a copy of the same network, where the two do not share them.

    So a replica's buffers reach the network where forward passes change them, as in batch normalisation. Where several
    processes share the network, those of the last one to write stay.
    """
    for mine, theirs in zip(target.buffers(), source.buffers(), strict=True):
        if mine is not theirs:
            mine.copy_(theirs)

"""Checks of a custom network: that a2c can call it, before anything starts."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from a2c.compute.compute import Compute
from a2c.compute.replica import in_precision
from a2c.envs.single import Spaces
from a2c.policy import initial_state, replay, step


def check_network(net: nn.Module, spaces: Spaces, compute: Compute | None = None) -> None:
    """ValueError if a custom network does not map observations to logits and values, also in `compute.precision`, or
    cannot be called by `compute.threads` at once.
    """
    if not isinstance(net, nn.Module):
        raise ValueError(f"network must make a torch.nn.Module, got {type(net).__name__}")
    _check_outputs(net, spaces, "network")
    if compute is not None and compute.threads > 1:
        before = _tensors_of(net)
        _check_outputs(net, spaces, "network")  # a second call: what only the first one stores is a constant
        if stored := [name for name, value in _tensors_of(net).items() if value is not before.get(name)]:
            raise ValueError(
                f"network must not store a tensor on itself in a call, as it does in {stored[0]}: several threads call "
                "it at once. Use a local variable, or set threads to 1"
            )
    if compute is not None and compute.precision != torch.float32:
        copied = in_precision(copy.deepcopy(net), compute.precision)  # a forward pass may change its buffers
        _check_outputs(copied, spaces, f"network in {compute.precision_name}")


def _tensors_of(net: nn.Module) -> dict[str, Tensor]:
    """The tensors that are attributes of `net` and its parts, by name, without parameters and buffers."""
    parts = [(f"{prefix}." if prefix else "", vars(part)) for prefix, part in net.named_modules()]
    return {prefix + name: value for prefix, own in parts for name, value in own.items() if isinstance(value, Tensor)}


def _check_outputs(net: nn.Module, spaces: Spaces, network: str) -> None:
    """ValueError for wrong outputs of `net`, which the message calls `network`."""
    obs = torch.from_numpy(np.zeros((2, *spaces.obs_shape), spaces.obs_dtype))
    shape = ", ".join(map(str, ("B", *spaces.obs_shape)))
    rule = f"{network} must map obs [{shape}] of {obs.dtype} to (logits [B, A], values [B, 1])"
    try:
        with torch.no_grad():
            logits, values = net(obs)
        shapes = [list(logits.shape), list(values.shape)]
    except Exception as error:
        raise ValueError(f"{rule}, got {type(error).__name__}: {error}") from error
    if shapes != [[2, spaces.n_actions], [2, 1]]:
        raise ValueError(f"{rule}, got {shapes} for B = 2 and A = {spaces.n_actions}")
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise ValueError("network must have parameters that can be learned, got none with requires_grad")
    if getattr(net, "rnn_state_size", 0):
        _check_recurrent(net, obs, spaces.n_actions, network)


def _check_recurrent(net: nn.Module, obs: Tensor, n_actions: int, network: str) -> None:
    """ValueError if `step` or `replay` cannot use `net`, which the message calls `network`; `obs [2, ...]`."""
    rule = f"{network} with rnn_state_size H must have step and replay, as LstmA2C has"
    rnn_state, starts = initial_state(net, 2), torch.ones(2, dtype=torch.bool)
    try:
        with torch.no_grad():
            outputs = (*step(net, obs, rnn_state, starts), *replay(net, obs[None], starts[None], rnn_state))
    except Exception as error:
        raise ValueError(f"{rule}, got {type(error).__name__}: {error}") from error
    shapes, size = [list(output.shape) for output in outputs], rnn_state.shape[1]
    if shapes != [[2, n_actions], [2, 1], [2, size], [1, 2, n_actions], [1, 2]]:
        raise ValueError(f"{rule}, got {shapes} for B = 2, A = {n_actions} and H = {size}")

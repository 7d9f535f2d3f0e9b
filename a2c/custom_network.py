"""Custom networks: checked before anything starts, and made to load parameters into."""

from __future__ import annotations

import copy
from collections.abc import Callable

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
        _check_stored(net, spaces)
    if compute is not None and compute.precision != torch.float32:
        copied = in_precision(copy.deepcopy(net), compute.precision)  # a forward pass may change its buffers
        _check_outputs(copied, spaces, f"network in {compute.precision_name}")


def make_apart(make: Callable[[], nn.Module]) -> nn.Module:
    """What `make()` returns; a copy if it always returns the same network, which may be in training."""
    net = make()
    if make() is not net:
        return net
    results = (value for value in _stored_tensors(net).values() if not value.is_leaf)  # of calls: cannot be copied
    return copy.deepcopy(net, {id(value): value.detach() for value in results})


def _check_stored(net: nn.Module, spaces: Spaces) -> None:
    """ValueError if a call stores tensors on `net`, which another thread would overwrite."""
    before, buffers = _stored_tensors(net), [buffer.clone() for buffer in net.buffers()]
    _check_outputs(net, spaces, "network", 3)  # a second call: what only the first one stores is a constant
    if stored := [name for name, value in _stored_tensors(net).items() if value is not before.get(name)]:
        raise ValueError(
            f"network must not store a tensor on itself in a call, as it does in {stored[0]}: several threads call it "
            "at once. Use a local variable, or set threads to 1"
        )
    with torch.no_grad():
        for buffer, value in zip(net.buffers(), buffers, strict=True):
            buffer.copy_(value)


def _stored_tensors(net: nn.Module) -> dict[str, Tensor]:
    """The tensors of `net` and its parts by name, also those in lists, tuples and dictionaries."""
    found: dict[str, Tensor] = {}

    def look(name: str, value: object, depth: int) -> None:
        if isinstance(value, Tensor):
            found[name.replace("._buffers", "").replace("._parameters", "")] = value
        elif depth and isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                look(f"{name}.{key}", item, depth - 1)

    for name, part in net.named_modules():
        look(name, vars(part), 4)
    return {name.removeprefix("."): value for name, value in found.items()}


def _check_outputs(net: nn.Module, spaces: Spaces, network: str, size: int = 2) -> None:
    """ValueError for wrong outputs of `net`, which the message calls `network`, for `size` observations."""
    obs = torch.from_numpy(np.zeros((size, *spaces.obs_shape), spaces.obs_dtype))
    shape = ", ".join(map(str, ("B", *spaces.obs_shape)))
    rule = f"{network} must map obs [{shape}] of {obs.dtype} to (logits [B, A], values [B, 1])"
    try:
        with torch.no_grad():
            logits, values = net(obs)
        shapes = [list(logits.shape), list(values.shape)]
    except Exception as error:
        raise ValueError(f"{rule}, got {type(error).__name__}: {error}") from error
    if shapes != [[size, spaces.n_actions], [size, 1]]:
        raise ValueError(f"{rule}, got {shapes} for B = {size} and A = {spaces.n_actions}")
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise ValueError("network must have parameters that can be learned, got none with requires_grad")
    if getattr(net, "rnn_state_size", 0):
        _check_recurrent(net, obs, spaces.n_actions, network)


def _check_recurrent(net: nn.Module, obs: Tensor, n_actions: int, network: str) -> None:
    """ValueError if `step` or `replay` cannot use `net`, which the message calls `network`; `obs [B, ...]`."""
    rule = f"{network} with rnn_state_size H must have step and replay, as LstmA2C has"
    rnn_state, starts = initial_state(net, len(obs)), torch.ones(len(obs), dtype=torch.bool)
    try:
        with torch.no_grad():
            outputs = (*step(net, obs, rnn_state, starts), *replay(net, obs[None], starts[None], rnn_state))
    except Exception as error:
        raise ValueError(f"{rule}, got {type(error).__name__}: {error}") from error
    shapes, (b, h) = [list(output.shape) for output in outputs], rnn_state.shape
    if shapes != [[b, n_actions], [b, 1], [b, h], [1, b, n_actions], [1, b]]:
        raise ValueError(f"{rule}, got {shapes} for B = {b}, A = {n_actions} and H = {h}")

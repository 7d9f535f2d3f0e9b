"""The average of a network's parameters over its updates, which acts in place of the network (`--average-decay`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from a2c.compute.compute import Compute
from a2c.compute.replica import copy_buffers, copy_network, make_replica, sync_replica


class Average:
    """An exponential moving average of the parameters: less noisy than those after the last update.

    Source: Polyak & Juditsky (1992), "Acceleration of stochastic approximation by averaging", there of all
    parameters alike; this one forgets old ones exponentially. `net` holds it in float32, `replica` acts. Buffers are
    not averaged: they are those of the network that learns.
    """

    def __init__(self, net: nn.Module, compute: Compute, decay: float) -> None:
        """Begin at the parameters of `net`, whose pixel statistics it shares."""
        self.net, self.decay = copy_network(net).requires_grad_(False), decay
        self.replica = make_replica(self.net, compute)

    @torch.no_grad()
    def update(self, net: nn.Module, updates: int) -> None:
        """`average <- d * average + (1 - d) * net` after update number `updates` of `net`.

        d is `decay`, at first `(1 + updates) / (10 + updates)`, so that the first parameters are soon forgotten
        (as in TensorFlow's ExponentialMovingAverage with `num_updates`).
        """
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(list(self.net.parameters()), list(net.parameters()), 1.0 - decay)

    def sync(self, net: nn.Module) -> None:
        """Let the average act as it is now, with the buffers of `net`."""
        copy_buffers(self.net, net)
        if self.replica is not self.net:
            sync_replica(self.replica, self.net)

    def apart(self, net: nn.Module) -> dict[str, Tensor]:
        """The state of `net` without the statistics that the average shares; the live tensors."""
        mine = self.net.state_dict()
        return {name: value for name, value in net.state_dict().items() if value.data_ptr() != mine[name].data_ptr()}

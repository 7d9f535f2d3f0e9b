"""What crosses between main memory and the device, once per decision or once per rollout.

On the CPU nothing crosses: the same calls copy an observation to its place, or do nothing. On a GPU, copies go
through page-locked ("pinned") buffers and the host does not wait for them; it waits once per decision, for the actions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` of the host, in pinned memory if `device` is a GPU, otherwise unchanged."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.numel() else tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. A GPU is not waited for: torch keeps the pinned copy until it was read."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return pinned(tensor, device).to(device, non_blocking=True)


class Staging:
    """Observations `[n, ...]` of a group of environments cross to the device, and its actions `[n]` come back.

    Every buffer is used again for each decision without another wait: what is in it was read before the actions
    that were chosen from it came back, and the environments step only then.
    """

    def __init__(self, obs: Tensor, newest_only: bool) -> None:
        """`obs [n, ...]`: observations like those that will cross, on the device.

        `newest_only`: they are stacks of frames `[n, K, H, W]`. Only the newest frame crosses, and the rest is taken
        from the observation before; where an episode has begun, which has zeros there, the whole stack crosses.
        """
        self.device, self.newest_only = obs.device, newest_only
        self.crosses = newest_only or obs.device.type != "cpu"
        self.obs = self._buffer(obs) if self.crosses else obs
        self.newest = self._buffer(obs[:, -1]) if newest_only else obs
        self.rows = self._buffer(torch.zeros(len(obs), dtype=torch.int64))
        self.actions = self._buffer(torch.zeros(len(obs), dtype=torch.int64))
        self.done = torch.cuda.Event() if obs.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def _buffer(self, like: Tensor) -> Tensor:
        return pinned(torch.zeros(like.shape, dtype=like.dtype), self.device)

    def store(self, obs: np.ndarray, ended: np.ndarray, previous: Tensor, out: Tensor) -> None:
        """Write the environments' `obs [n, ...]` to `out` on the device; `obs` may change afterwards.

        `previous [n, ...]`: the observations before, on the device; `ended [n]`: `obs` begins an episode, or may.
        """
        if not self.crosses:
            out.copy_(torch.from_numpy(obs))
        elif not self.newest_only:
            out.copy_(self.obs.copy_(torch.from_numpy(obs)), non_blocking=True)
        else:
            newest = self.newest.copy_(torch.from_numpy(obs[:, -1])).to(self.device, non_blocking=True)
            torch.cat([previous[:, 1:], newest[:, None]], dim=1, out=out)
            self._store_rows(obs, np.flatnonzero(ended), out)

    def _store_rows(self, obs: np.ndarray, rows: np.ndarray, out: Tensor) -> None:
        """Write whole observations to `rows` of `out`: by an index, because a mask would make the host wait."""
        if len(rows):
            index = self.rows[: len(rows)].copy_(torch.from_numpy(rows))
            whole = self.obs[: len(rows)].copy_(torch.from_numpy(obs[rows]))
            out.index_copy_(0, *(part.to(self.device, non_blocking=True) for part in (index, whole)))

    def actions_on_host(self, actions: Tensor) -> np.ndarray:
        """`actions [n]` as an array, which the next call overwrites: the one wait of a decision."""
        if actions.device.type == "cpu":
            return actions.numpy()
        self.actions.copy_(actions, non_blocking=True)
        if self.done is not None:
            self.done.record()
            self.done.synchronize()
        return self.actions.numpy()

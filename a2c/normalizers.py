"""Pixels as a network wants them: centred and scaled by running statistics.

Statistics are part of the policy: buffers in its state_dict, changed only by `update` and `merge`. The
learner does that between rollouts, so acting and learning see the same numbers. Each worker of A3C feeds
statistics of its own, and acts and learns with those of all merged.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from a2c.compute.ranks import Ranks

ALONE = Ranks()


class PixelNorm(nn.Module):
    """Centre and scale every pixel by its running mean and deviation (128 and 64 at first), clipped to +-5.

    The statistics are cumulative over training. Of stacked frames: one mean and variance per pixel,
    `[H, W]`, measured on the newest frame and used for all; of an image in colours: `[C, H, W]`. A ball that covers a
    pixel one time in a thousand becomes a signal of 5 on a background of 0.
    """

    CLIP = 5.0
    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, frame_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.stacked = len(frame_shape) == 2  # `update` gets the newest frame of each observation, not all
        # In float64: after 1e7 frames one more moves the mean by less than half a step of float32.
        self.register_buffer("mean", torch.full(frame_shape, 128.0, dtype=torch.float64))
        self.register_buffer("var", torch.full(frame_shape, 64.0**2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, obs: Tensor) -> Tensor:
        """`[..., H, W]` (or `[..., C, H, W]`) pixels 0..255 to the same shape, float32 in -5..5."""
        # +1, a grey level squared: a constant pixel is not divided by 0, a nearly constant one not scaled up.
        scale = (self.var.float() + 1.0).rsqrt_()
        mean = self.mean.float()
        if obs.ndim == 4 and not obs.is_contiguous():
            # channels_last: loops run over whole frames, not over 4 channels, with statistics in the same order.
            mean, scale = (x.expand_as(obs[:1]).contiguous(memory_format=torch.channels_last) for x in (mean, scale))
        return obs.to(torch.float32, copy=True).sub_(mean).mul_(scale).clamp_(-self.CLIP, self.CLIP)

    @torch.no_grad()
    def update(self, frames: Tensor, ranks: Ranks = ALONE, steps: int = 1) -> None:
        """Merge the statistics of all ranks' `frames [B, H, W]` or `[B, C, H, W]` (Chan et al., 1983, eq. 2.1)."""
        # Moments about a number near the mean: faster than torch.var_mean along this dimension.
        near = self.mean.float()
        deviation = frames.to(torch.float32, copy=True).sub_(near)
        shift = deviation.mean(dim=0)
        var = (deviation.square_().mean(dim=0) - shift.square()).clamp_(min=0.0).double()
        count: int | Tensor = len(frames)
        if ranks.size > 1:
            count, shift, var = _over_ranks(ranks, len(frames), shift, var)
        delta = near.double() - self.mean + shift
        total = self.count + count
        share = count / total.double()
        self.var += (var - self.var) * share + delta.square() * share * (1.0 - share)
        self.mean += delta * share
        self.count.copy_(total)

    @torch.no_grad()
    def merge(self, parts: Sequence[Any]) -> None:
        """Become the statistics of all frames of `parts`; an exact copy of the first if only it has seen any."""
        counts = [int(part.count) for part in parts]  # read first: a worker that updates meanwhile writes it last
        self.load_state_dict(parts[0].state_dict())
        seen = counts[0]
        for part, count in zip(parts[1:], counts[1:], strict=True):
            seen += count
            share = count / max(seen, 1)
            delta = part.mean - self.mean
            self.var += (part.var - self.var) * share + delta.square() * share * (1.0 - share)
            self.mean += delta * share
        self.count.fill_(seen)


class FrameNorm(nn.Module):
    """Centre and scale whole frames by running averages of a frame's mean and standard deviation.

    ::

        m[k] = alpha * m[k - 1] + (1 - alpha) * mean(frame[k]),  s likewise,  m[0] = s[0] = 0
        x    = (frame - m / (1 - alpha^k)) / (s / (1 - alpha^k))

    The division undoes the bias of the zero that the averages start from (Kingma & Ba, 2015,
    section 3, who do it for Adam's moments). Formula and alpha are those of `NormalizedEnv` in
    dgriff777/rl_a3c_pytorch. A frame is the last of a stack (`stacked`) or all channels of an image.
    """

    ALPHA = 0.9999
    mean: Tensor
    std: Tensor
    count: Tensor

    def __init__(self, stacked: bool = True) -> None:
        super().__init__()
        self.stacked = stacked  # as in PixelNorm
        for name in ("mean", "std"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, obs: Tensor) -> Tensor:
        """`[..., H, W]` pixels 0..255 to `[..., H, W]` float32; divided by 255 before the first `update`."""
        mean, std = self.moments()
        return obs.to(torch.float32, copy=True).sub_(mean).div_(std + 1e-8)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of a frame, without bias, as float32 scalars."""
        bias = (1.0 - self.ALPHA ** self.count.double()).clamp(min=1e-12)
        fresh = self.count == 0
        mean = torch.where(fresh, 0.0, self.mean / bias).float()
        return mean, torch.where(fresh, 255.0, self.std / bias).float()

    @torch.no_grad()
    def update(self, frames: Tensor, ranks: Ranks = ALONE, steps: int = 1) -> None:
        """Take in `frames [B, H, W]` or `[B, C, H, W]`: those of N environments for each of `steps`, oldest step first.

        Every rank passes its environments' frames of the same steps.
        """
        pixels = frames.flatten(1).float()
        moments = torch.stack([pixels.mean(1), pixels.std(1, correction=0)]).view(2, steps, -1)  # [2, T, N]
        means, stds = ranks.join_columns(moments).flatten(1)  # [B] each
        ages = torch.arange(len(means) - 1, -1, -1, dtype=torch.float64, device=frames.device)
        weights = (1.0 - self.ALPHA) * self.ALPHA**ages  # [B]
        for average, values in ((self.mean, means), (self.std, stds)):
            average.mul_(self.ALPHA ** len(means)).add_(weights @ values.double())
        self.count += len(means)

    @torch.no_grad()
    def merge(self, parts: Sequence[Any]) -> None:
        """Become the mean of the averages of `parts`, each weighted by what it has seen: 1 - alpha^k after k frames.

        The first's, bit for bit, if only it has seen any.
        """
        counts = [int(part.count) for part in parts]
        weights = [1.0 - self.ALPHA**count for count in counts]
        # m[k] is an average times its weight already, and has to become one times the weight of all frames together.
        scale = (1.0 - self.ALPHA ** sum(counts)) / (sum(weights) or 1.0)
        for name in ("mean", "std"):
            getattr(self, name).copy_(sum(getattr(part, name) for part in parts) * scale)
        self.count.fill_(sum(counts))


def _over_ranks(ranks: Ranks, count: int, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number, mean and variance of the samples of all ranks, of which this one has `count`."""
    mean = mean.double()
    sums = torch.cat([mean.new_ones(1), mean.flatten(), (var + mean.square()).flatten()]) * count
    number, *moments = ranks.all_reduce(sums).tensor_split([1, 1 + mean.numel()])
    mean, square = (moment.view_as(mean) / number for moment in moments)
    return number[0].long(), mean, square - mean.square()


def slots_like(normalizer: PixelNorm | FrameNorm | None, number: int) -> list[PixelNorm | FrameNorm]:
    """`number` copies, each updated on its own and merged later; the first keeps what `normalizer` has seen, the
    others start from nothing.
    """
    slots: list[PixelNorm | FrameNorm] = (
        [] if normalizer is None else [copy.deepcopy(normalizer) for _ in range(number)]
    )
    for slot in slots[1:]:
        for buffer in slot.buffers():
            buffer.zero_()
    return slots

"""Networks: observation in, action logits and state value out. They know no environment.

Every network maps `obs [B, ...]` (uint8 or float 0..255 for images) to
`(logits [B, A], values [B, 1])`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from a2c.config import Config


class PixelNorm(nn.Module):
    """Centre and scale every pixel by its running mean and standard deviation, clipped to +-5.

    The statistics are those of the newest frame, cumulative over training, and hold for each
    frame of the stack. They are part of the policy: buffers in its state_dict, changed by
    `update` alone, so acting, learning and evaluation see the same numbers. A ball that
    covers a pixel one time in a thousand becomes a signal of 5 on a background of 0.
    """

    CLIP = 5.0
    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, frame_shape: tuple[int, int]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full(frame_shape, 128.0))
        self.register_buffer("var", torch.full(frame_shape, 64.0**2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, obs: Tensor) -> Tensor:
        """`[..., H, W]` pixels 0..255 to `[..., H, W]` float32 in -5..5."""
        # +1: one grey level of noise, so that a constant pixel stays quiet.
        scaled = obs.to(torch.float32, copy=True).sub_(self.mean).mul_((self.var + 1.0).rsqrt())
        return scaled.clamp_(-self.CLIP, self.CLIP)

    @torch.no_grad()
    def update(self, frames: Tensor) -> None:
        """Merge the statistics of `frames [B, H, W]` (Chan et al., 1983, equation 2.1)."""
        # Moments about the running mean, which is near: five times as fast as torch.var_mean along this dimension.
        apart = frames.to(torch.float32, copy=True).sub_(self.mean)
        delta = apart.mean(dim=0)
        var = (apart.square_().mean(dim=0) - delta.square()).clamp_(min=0.0)
        total = self.count + len(frames)
        share = len(frames) / total.float()
        self.var += (var - self.var) * share + delta.square() * share * (1.0 - share)
        self.mean += delta * share
        self.count.copy_(total)


class AtariA2C(nn.Module):
    """The classic Atari network: three convolutions, then separate policy and value heads.

    Convolutions 32x8 stride 4, 64x4 stride 2, 64x3 stride 1 (Mnih et al., 2015), ReLU; each
    head is 3136 -> 512 -> out for 84x84 frames. Without a `normalizer` pixels are divided by
    256, and a state_dict of the classic notebook loads unchanged.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...] = (4, 84, 84),
        n_actions: int = 6,
        normalizer: PixelNorm | None = None,
    ) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.conv = nn.Sequential(
            nn.Conv2d(input_shape[0], 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
        )
        features = conv_features(self.conv, input_shape)
        self.policy = nn.Sequential(nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, n_actions))
        self.value = nn.Sequential(nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, 1))
        orthogonal_init(self)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`obs [B, 4, S, S]` to `(logits [B, A], values [B, 1])`."""
        hidden = self.conv(scale_pixels(obs, self)).flatten(1)
        return self.policy(hidden), self.value(hidden)


class SharedA2C(nn.Module):
    """Convolutions and one hidden layer that policy and value share.

    `nature`: the convolutions of `AtariA2C` and 512 units, which is what Stable-Baselines3
    trains. `small`: 16x4 stride 2, 32x4 stride 2 and 256 units, for 42x42 frames.
    """

    KINDS: ClassVar = {  # name: (convolutions as (channels, kernel, stride), hidden units)
        "nature": (((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),
        "small": (((16, 4, 2), (32, 4, 2)), 256),
    }

    def __init__(
        self, kind: str, input_shape: tuple[int, ...], n_actions: int, normalizer: PixelNorm | None = None
    ) -> None:
        super().__init__()
        convolutions, units = self.KINDS[kind]
        self.normalizer = normalizer
        self.conv = nn.Sequential()
        channels = input_shape[0]
        for out, kernel, stride in convolutions:
            self.conv.extend([nn.Conv2d(channels, out, kernel, stride), nn.ReLU()])
            channels = out
        self.hidden = nn.Sequential(nn.Linear(conv_features(self.conv, input_shape), units), nn.ReLU())
        self.policy = nn.Linear(units, n_actions)
        self.value = nn.Linear(units, 1)
        orthogonal_init(self)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`obs [B, 4, S, S]` to `(logits [B, A], values [B, 1])`."""
        hidden = self.hidden(self.conv(scale_pixels(obs, self)).flatten(1))
        return self.policy(hidden), self.value(hidden)


class MlpA2C(nn.Module):
    """Separate policy and value perceptrons, 64 tanh units twice, for vector observations."""

    normalizer = None

    def __init__(self, input_shape: tuple[int, ...], n_actions: int) -> None:
        super().__init__()
        features = math.prod(input_shape)

        def head(outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(features, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
            )

        self.policy, self.value = head(n_actions), head(1)
        orthogonal_init(self)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`obs [B, ...]` to `(logits [B, A], values [B, 1])`."""
        flat = obs.to(self.policy[0].weight.dtype).flatten(1)
        return self.policy(flat), self.value(flat)


def network_kind(config: Config, input_shape: tuple[int, ...]) -> str:
    """The network that `auto` stands for; ValueError where the named one cannot read the observation."""
    image = len(input_shape) == 3 and min(input_shape[1:]) >= 10  # [C, H, W]
    kind = config.network if config.network != "auto" else ("atari" if image else "mlp")
    if kind != "mlp" and not image:
        raise ValueError(f"network must be mlp for observations of shape {list(input_shape)}, got {kind}")
    if kind in ("atari", "nature") and min(input_shape[1:]) < 36:
        raise ValueError(f"frame_size must be at least 36 for network {kind}, got {min(input_shape[1:])}")
    return kind


def resolve(config: Config, input_shape: tuple[int, ...]) -> Config:
    """Replace `auto` by what it stands for; few numbers per observation gain nothing from bfloat16."""
    kind = network_kind(config, input_shape)
    precision = "float32" if kind == "mlp" and config.precision == "auto" else config.precision
    return replace(config, network=kind, precision=precision)


def make_network(config: Config, input_shape: tuple[int, ...], n_actions: int) -> nn.Module:
    """The network that `config.network` names; ValueError where it cannot read the observation."""
    kind = network_kind(config, input_shape)
    if kind == "mlp":
        return MlpA2C(input_shape, n_actions)
    normalizer = PixelNorm((input_shape[1], input_shape[2])) if config.normalize_obs else None
    if kind == "atari":
        return AtariA2C(input_shape, n_actions, normalizer)
    return SharedA2C(kind, input_shape, n_actions, normalizer)


def scale_pixels(obs: Tensor, net: AtariA2C | SharedA2C) -> Tensor:
    """Pixels 0..255 as input in the network's dtype: normalised, or the classic division by 256."""
    dtype = net.conv[0].weight.dtype
    if net.normalizer is not None:
        return net.normalizer(obs).to(dtype)
    return obs.to(dtype) / 256  # exact in bfloat16 too: 8 bits, divided by a power of two


def conv_features(conv: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Number of features that `conv` makes of one observation."""
    with torch.no_grad():
        return conv(torch.zeros(1, *input_shape)).numel()


def orthogonal_init(net: nn.Module) -> None:
    """Orthogonal weights: gain sqrt(2), 0.01 for the logits (an almost uniform start), 1 for the value."""
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.orthogonal_(module.weight, math.sqrt(2))
            nn.init.zeros_(module.bias)
    for head, gain in ((net.policy, 0.01), (net.value, 1.0)):
        last = head[-1] if isinstance(head, nn.Sequential) else head
        nn.init.orthogonal_(last.weight, gain)

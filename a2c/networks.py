"""Networks: observations in, action logits and state values out. They do not depend on an environment.

Every network maps `obs [B, ...]` (uint8 or float 0..255 for images) to `(logits [B, A], values [B, 1])`. A
recurrent one has `rnn_state_size`, `step` and `replay`, too, as `LstmA2C` has; its `forward` starts from zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from a2c.config.config import Config
from a2c.config.resolve import resolve
from a2c.normalizers import FrameNorm, PixelNorm

NetworkFn = Callable[[tuple[int, ...], int], nn.Module]  # makes a network for (shape of one observation, actions A)


class OutputLayer(nn.Linear):
    """The last layer of a head: float32 in a bfloat16 replica, too, as bfloat16 numbers near 90 are 0.5 apart."""

    keeps_float32 = True

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden [B, F]` in any precision to `[B, out]` in this layer's own."""
        return super().forward(hidden.to(self.weight.dtype))


class AtariA2C(nn.Module):
    """The Atari network of Lapan (2018): the convolutions of Nature DQN, then separate policy and value heads.

    Convolutions of 32 channels (8x8, stride 4), 64 (4x4, stride 2) and 64 (3x3, stride 1), ReLU (Mnih et
    al., 2015); each head is 3136 -> 512 -> out for 84x84 frames. `input_shape`: `(K, S, S)`, S at least 36. Without a
    `normalizer` pixels are divided by 256, and the state_dict holds the parameters of `conv`, `policy`, `value` only.
    """

    def __init__(
        self, input_shape: tuple[int, ...] = (4, 84, 84), n_actions: int = 6, normalizer: PixelNorm | None = None
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
        self.policy = nn.Sequential(nn.Linear(features, 512), nn.ReLU(), OutputLayer(512, n_actions))
        self.value = nn.Sequential(nn.Linear(features, 512), nn.ReLU(), OutputLayer(512, 1))
        orthogonal_init(self)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`obs [B, K, S, S]` to `(logits [B, A], values [B, 1])`."""
        hidden = flat_features(obs, self)
        return self.policy(hidden), self.value(hidden)


class SharedA2C(nn.Module):
    """Convolutions and one hidden layer that policy and value share.

    `nature`: the convolutions of `AtariA2C` and 512 units, which is what Stable-Baselines3 trains. `nips`: 16 channels
    (8x8, stride 4), 32 (4x4, stride 2) and 256 units (Mnih et al., 2013), which A3C and GA3C used. `small`: the same
    with 4x4, stride 2, in both, for 42x42 frames.
    """

    KINDS: ClassVar = {  # name: (convolutions as (channels, kernel, stride), hidden units)
        "nature": (((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),
        "nips": (((16, 8, 4), (32, 4, 2)), 256),
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
        self.policy = OutputLayer(units, n_actions)
        self.value = OutputLayer(units, 1)
        orthogonal_init(self)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`obs [B, K, S, S]` to `(logits [B, A], values [B, 1])`."""
        hidden = self.hidden(flat_features(obs, self))
        return self.policy(hidden), self.value(hidden)


class MlpA2C(nn.Module):
    """Separate policy and value MLPs, two hidden layers of 64 tanh units each, for vector observations."""

    normalizer = None

    def __init__(self, input_shape: tuple[int, ...], n_actions: int) -> None:
        super().__init__()
        features = math.prod(input_shape)

        def head(outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(features, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), OutputLayer(64, outputs)
            )

        self.policy, self.value = head(n_actions), head(1)
        orthogonal_init(self)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`obs [B, ...]` to `(logits [B, A], values [B, 1])`."""
        flat = obs.to(next(self.parameters()).dtype).flatten(1)
        return self.policy(flat), self.value(flat)


class LstmA2C(nn.Module):
    """A recurrent network: convolutions, an LSTM cell, linear policy and value.

    For images four convolutions of 32 channels (3x3, stride 2, padding 1) with ELU, as in OpenAI's
    universe-starter-agent; the 256 units are those of Mnih et al. (2016), section 5.1. A vector enters the cell as is.
    An rnn_state `[B, rnn_state_size]` is the cell's hidden and cell state side by side.
    """

    def __init__(
        self, input_shape: tuple[int, ...], n_actions: int, units: int = 256, normalizer: FrameNorm | None = None
    ) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.conv = nn.Sequential()
        if len(input_shape) == 3:
            for channels in (input_shape[0], 32, 32, 32):
                self.conv.extend([nn.Conv2d(channels, 32, 3, 2, 1), nn.ELU()])
        self.lstm = nn.LSTMCell(conv_features(self.conv, input_shape), units)
        self.policy, self.value = OutputLayer(units, n_actions), OutputLayer(units, 1)
        self.rnn_state_size = 2 * units
        orthogonal_init(self)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """`obs [B, ...]` to `(logits [B, A], values [B, 1])`, from a zero rnn_state."""
        logits, values, _ = self.step(obs, torch.zeros(len(obs), self.rnn_state_size, device=obs.device))
        return logits, values

    def step(self, obs: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`obs [B, ...]` and `rnn_state [B, H]` to `(logits [B, A], values [B, 1], rnn_state [B, H])`."""
        return self._cell_step(flat_features(obs, self), rnn_state)

    def replay(self, obs: Tensor, starts: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
        """`step` for each of `obs [T, N, ...]` in turn, from `rnn_state [N, H]`, set to zero where `starts [T, N]`.

        Returns `(logits [T * N, A], values [T * N, 1])`. The gradient flows through the whole
        window and ends where an episode starts.
        """
        features = flat_features(obs.flatten(0, 1), self).view(*obs.shape[:2], -1)  # [T, N, F]
        logits, values = [], []
        for t in range(len(obs)):
            step_logits, step_values, rnn_state = self._cell_step(features[t], rnn_state * ~starts[t, :, None])
            logits.append(step_logits)
            values.append(step_values)
        return torch.cat(logits), torch.cat(values)

    def _cell_step(self, features: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, cell = self.lstm(features, tuple(rnn_state.to(features.dtype).chunk(2, dim=1)))
        return self.policy(hidden), self.value(hidden), torch.cat([hidden, cell], dim=1)


def make_network(
    config: Config, input_shape: tuple[int, ...], n_actions: int, stacked: bool, custom: NetworkFn | None = None
) -> nn.Module:
    """The network that `config.network` names; ValueError if it cannot take the observation.

    `stacked`: the channels of an image are successive frames (Atari games), not its colours;
    pixel statistics depend on it. `custom` makes the network of that name.
    """
    config = resolve(config, input_shape)
    kind = config.network
    if kind == "custom":
        if custom is None:
            raise ValueError("network custom must be given in Python, as the argument network, got none")
        if isinstance(custom, nn.Module):
            raise ValueError("network must be a class or function that makes a network, got a network")
        return custom(input_shape, n_actions)
    image = len(input_shape) == 3
    if kind == "mlp":
        return MlpA2C(input_shape, n_actions)
    if kind == "lstm":
        norm = FrameNorm(stacked) if image and config.normalize_obs else None
        return LstmA2C(input_shape, n_actions, config.lstm_units, norm)
    normalizer = PixelNorm(input_shape[1:] if stacked else input_shape) if config.normalize_obs else None
    if kind == "atari":
        return AtariA2C(input_shape, n_actions, normalizer)
    return SharedA2C(kind, input_shape, n_actions, normalizer)


def scale_pixels(obs: Tensor, net: AtariA2C | SharedA2C | LstmA2C) -> Tensor:
    """Pixels 0..255 as input in the network's dtype: normalised, or the classic division by 256."""
    dtype = next(net.conv.parameters()).dtype
    if torch.is_grad_enabled() and dtype == torch.float32 and obs.shape[1] > 1 and not obs.is_cuda:
        # Learning in float32 is faster in channels_last, acting slower.
        obs = obs.contiguous(memory_format=torch.channels_last)
    if net.normalizer is not None:
        obs = net.normalizer(obs)
        return obs.to(dtype)
    return obs.to(dtype) / 256  # exact in bfloat16 too: 8 bits, divided by a power of two


def flat_features(obs: Tensor, net: AtariA2C | SharedA2C | LstmA2C) -> Tensor:
    """`obs [B, ...]` through the convolutions of `net` to `[B, F]`; without any, a vector as it is."""
    if not len(net.conv):
        return obs.to(next(net.parameters()).dtype).flatten(1)
    features: Tensor = net.conv(scale_pixels(obs, net))
    if features.requires_grad and not features.is_contiguous():
        # The gradient of ReLU takes much longer where it mixes two layouts.
        features.register_hook(lambda grad: grad.contiguous(memory_format=torch.channels_last))  # type: ignore[no-untyped-call]
    return features.flatten(1)


def conv_features(conv: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Number of features that `conv` makes of one observation; ValueError if it is too small for the kernels."""
    channels, *sizes = input_shape
    for layer in conv.children():
        if isinstance(layer, nn.Conv2d):
            assert not isinstance(layer.padding, str)
            steps = zip(sizes, layer.padding, layer.kernel_size, layer.stride, strict=True)
            channels, sizes = layer.out_channels, [(n + 2 * p - k) // s + 1 for n, p, k, s in steps]
    if min(sizes, default=1) < 1:  # `sizes` is empty for a vector
        raise ValueError(f"input_shape must be larger for these convolutions, got {list(input_shape)}")
    return channels * math.prod(sizes)


def orthogonal_init(net: AtariA2C | SharedA2C | MlpA2C | LstmA2C) -> None:
    """Orthogonal weights: gain sqrt(2), 0.01 for the logits (an almost uniform start), 1 for the value and an LSTM."""
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.orthogonal_(module.weight, math.sqrt(2))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LSTMCell):
            for name, parameter in module.named_parameters():
                nn.init.orthogonal_(parameter) if "weight" in name else nn.init.zeros_(parameter)
    for head, gain in ((net.policy, 0.01), (net.value, 1.0)):
        last = next(module for module in head.modules() if isinstance(module, OutputLayer))
        nn.init.orthogonal_(last.weight, gain)

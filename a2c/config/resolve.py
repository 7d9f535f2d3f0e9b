"""Settings that depend on the environment: what `auto` and zeros stand for. It must not import torch."""

from __future__ import annotations

from dataclasses import replace

from a2c.config.config import Config, Network


def network_kind(config: Config, input_shape: tuple[int, ...]) -> Network:
    """The network that `auto` stands for; ValueError where the named one cannot read the observation."""
    image = len(input_shape) == 3 and min(input_shape[1:]) >= 10  # [C, H, W]
    kind: Network = config.network if config.network != "auto" else ("atari" if image else "mlp")
    if kind not in ("mlp", "lstm") and not image:
        raise ValueError(f"network must be mlp or lstm for observations of shape {list(input_shape)}, got {kind}")
    if kind in ("atari", "nature", "nips") and min(input_shape[1:]) < 36:
        raise ValueError(f"frame_size must be at least 36 for network {kind}, got {min(input_shape[1:])}")
    return kind


def resolve(config: Config, input_shape: tuple[int, ...]) -> Config:
    """Replace `auto` by what it stands for.

    Few numbers per observation gain nothing from bfloat16, and a memory carries its rounding on.
    """
    kind = network_kind(config, input_shape)
    precision = "float32" if kind in ("mlp", "lstm") and config.precision == "auto" else config.precision
    units = config.lstm_units or (256 if len(input_shape) == 3 else 16)
    guard = (1e-6 if config.algorithm == "ga3c" else 0.0) if config.log_eps is None else config.log_eps
    target = 18.0 if config.target_score is None and "pong" in config.env.lower() else config.target_score
    return replace(config, network=kind, precision=precision, lstm_units=units, log_eps=guard, target_score=target)

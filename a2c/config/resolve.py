"""Settings that depend on the environment or on each other: what `auto`, None and 0 stand for in a run."""

from __future__ import annotations

import re
from dataclasses import replace

from a2c.config.config import Config, Network

LEAST_IMAGE = 10  # height and width below which an array is a vector
LEAST_PIXELS = {"atari": 36, "nature": 36, "nips": 20}  # height and width that the convolutions need


def network_kind(config: Config, input_shape: tuple[int, ...]) -> Network:
    """The network of `config`, with `auto` resolved; ValueError if it cannot take `input_shape`."""
    size = min(input_shape[1:]) if len(input_shape) == 3 else 0  # [C, H, W]
    image = size >= LEAST_IMAGE
    auto: Network = "atari" if size >= LEAST_PIXELS["atari"] else "small" if image else "mlp"
    kind = auto if config.network == "auto" else config.network
    if config.network == "auto" and kind == "mlp" and sum(n >= LEAST_PIXELS["atari"] for n in input_shape) >= 2:
        raise ValueError(
            "network auto must have images of shape [C, H, W], or uint8 ones of [H, W] or [H, W, C] with C of 1, 3 or "
            f"4, got {list(input_shape)}: change the observations in a wrapper, or choose network mlp"
        )
    if kind not in ("mlp", "lstm", "custom") and not image:
        raise ValueError(f"network must be mlp or lstm for observations of shape {list(input_shape)}, got {kind}")
    if kind != "custom" and not input_shape:
        raise ValueError(f"network must be custom for observations that are single numbers, got {kind}")
    if size < LEAST_PIXELS.get(kind, 0):
        pixels = "x".join(map(str, input_shape[1:]))
        others = "nips, small, lstm" if size >= LEAST_PIXELS["nips"] else "small, lstm"
        raise ValueError(f"network must be {others} or custom for images of {pixels} pixels, got {kind}")
    return kind


def resolve(config: Config, input_shape: tuple[int, ...]) -> Config:
    """The settings of a run with observations of `input_shape`, with the values that `auto`, None and 0 stand for.

    ValueError as in `network_kind`. Small observations gain nothing from bfloat16, and a recurrent state would carry
    its rounding errors on, so `auto` is float32 for mlp and lstm, and for custom, which may compute in float32 alone.
    """
    kind, a3c = network_kind(config, input_shape), config.algorithm == "a3c"
    pong = re.fullmatch(r"(ale/)?pong(noframeskip)?(-v\d+)?", config.env.lower())
    return replace(
        config,
        network=kind,
        precision="float32" if kind in ("mlp", "lstm", "custom") and config.precision == "auto" else config.precision,
        lstm_units=config.lstm_units or (256 if len(input_shape) == 3 else 16),
        log_eps=(1e-6 if config.algorithm == "ga3c" else 0.0) if config.log_eps is None else config.log_eps,
        target_score=18.0 if config.target_score is None and pong else config.target_score,
        cuda=config.cuda and not a3c,
        threads=1 if a3c else config.threads,  # one per worker; the run's own process computes almost nothing
    )


def allows_cuda_graphs(config: Config) -> bool:
    """Whether the settings allow CUDA graphs; `Compute.cuda_graphs` also needs a GPU and a single rank."""
    if not config.cuda_graphs or config.sliding_batch or config.network in ("lstm", "custom"):
        return False
    return config.algorithm == "a2c" and config.optimizer == "adam" and config.shuffle


def why_no_gpu(config: Config) -> str:
    """Why a run that asks for the GPU does not use it."""
    a3c = "workers of a3c share parameters in main memory"
    return a3c if config.algorithm == "a3c" else "torch finds no GPU here"

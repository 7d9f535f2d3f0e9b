"""Named sets of settings: what each preset changes in the defaults of `Config`."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "pong-fast": {
        "backend": "native",
        "num_envs": 32,
        "frame_size": 42,
        "network": "small",
        "batches_per_rollout": 4,
        "learning_rate": 0.004,
        "total_env_steps": 1_200_000,
    },
    "book": {
        "rollout_steps": 4,
        "batches_per_rollout": 1,
        "sliding_batch": 32,
        "gae_lambda": 1.0,
        "learning_rate": 0.003,
        "lr_decay": False,
        "entropy_coef": 0.03,
        "value_coef": 1.0,
        "max_grad_norm": 0.1,
        "normalize_obs": False,
        "total_env_steps": 10_000_000,
    },
}

"""Presets: named sets of settings, each as what it changes in the defaults of `Config`."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "pong-fast": {
        "backend": "native",
        "num_envs": 32,
        "frame_size": 42,
        "network": "small",
        "num_minibatches": 4,
        "learning_rate": 0.004,
        "total_env_steps": 1_200_000,
    },
    "cartpole": {
        "env": "CartPole-v1",
        "backend": "sync",
        "num_envs": 16,
        "threads": 1,
        "precision": "float32",
        "rollout_steps": 32,
        "num_minibatches": 8,
        "reward_clip": 0.1,  # returns reach 5; those of 50 would saturate the value network's tanh units
        "gamma": 0.98,
        "learning_rate": 0.0015,
        "adam_eps": 1e-5,
        "entropy_coef": 0.0005,
        "total_env_steps": 1_000_000,
        "target_score": 475.0,
    },
    "lstm": {
        "network": "lstm",
        "frame_size": 42,
        "frame_stack": 1,
        "crop": True,
        "num_minibatches": 5,
        "gae_lambda": 1.0,
        "learning_rate": 0.001,
        "adam_eps": 1e-5,
        "max_grad_norm": 2.0,  # of the mean over 20 steps, as 40 is of their sum
        "max_episode_frames": 40_000,
        "total_env_steps": 2_000_000,
    },
    "cartpole-lstm": {
        "env": "CartPole-v1",
        "backend": "sync",
        "num_envs": 16,
        "threads": 1,
        "network": "lstm",
        "rollout_steps": 32,
        "num_minibatches": 4,
        "reward_clip": 0.1,  # as above
        "gamma": 0.98,
        "learning_rate": 0.005,
        "adam_eps": 1e-5,
        "entropy_coef": 0.0,
        "value_coef": 0.2,  # value and policy share all layers
        "total_env_steps": 800_000,
        "target_score": 475.0,
    },
    "book": {
        "rollout_steps": 4,
        "num_minibatches": 1,
        "sliding_batch": 32,
        "gae_lambda": 1.0,
        "learning_rate": 0.003,
        "lr_final": 1.0,
        "entropy_coef": 0.03,
        "value_coef": 1.0,
        "max_grad_norm": 0.1,
        "normalize_obs": False,
        "total_env_steps": 10_000_000,
    },
}

"""Presets: named sets of settings, each as what it changes in the defaults of `Config`."""

from __future__ import annotations

from typing import Any

# The learning rate falls to zero; all schedules span the whole run.
WHOLE_RUN: dict[str, Any] = {"lr_final": 0.0, "schedule_end": 1.0, "entropy_coef": 0.01}
CONSTANT_BONUS: dict[str, Any] = {"entropy_final": 1.0, "entropy_hold": 0.0}
# A2C without reuse: each rollout is learned from once, environment by environment.
ONCE: dict[str, Any] = {**WHOLE_RUN, **CONSTANT_BONUS, "epochs": 1, "shuffle": False}

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "pong-fast": {
        "backend": "native",
        "num_envs": 16,
        "frame_size": 42,
        "network": "small",
        "rollout_steps": 128,
        "num_minibatches": 12,
        "lr_final": 0.15,
        "schedule_end": 0.4,
    },
    # For sticky actions: frames and network of `pong-fast`; rate and its schedule, rollouts and lambda of `atari`.
    "pong-sticky": {
        **WHOLE_RUN,
        **CONSTANT_BONUS,
        "env": "ALE/Pong-v5",
        "backend": "native",
        "num_envs": 32,
        "frame_size": 42,
        "network": "small",
        "rollout_steps": 64,
        "num_minibatches": 12,
        "epochs": 2,
        "learning_rate": 0.0005,
        "gae_lambda": 0.85,
        "total_env_steps": 6_000_000,
    },
    "atari": {
        **WHOLE_RUN,
        "backend": "native",
        "num_envs": 32,
        "network": "nips",
        "terminal_on_life_loss": True,
        "rollout_steps": 64,
        "num_minibatches": 12,
        "epochs": 2,
        "learning_rate": 0.0005,
        "gae_lambda": 0.85,
        "exploration_noise": 1.5,
        "total_env_steps": 10_000_000,
    },
    "a2c-strict": {
        **ONCE,
        "rollout_steps": 20,
        "num_minibatches": 5,
        "learning_rate": 0.003,
        "adam_eps": 1e-3,
        "total_env_steps": 1_500_000,
    },
    "cartpole": {
        **ONCE,
        "env": "CartPole-v1",
        "backend": "sync",
        "num_envs": 16,
        "threads": 1,
        "precision": "float32",
        "num_minibatches": 8,
        "reward_clip": 0.1,  # returns reach 5; those of 50 would saturate the value network's tanh units
        "gamma": 0.98,
        "learning_rate": 0.0015,
        "adam_eps": 1e-5,
        "entropy_coef": 0.0005,
        "target_score": 475.0,
    },
    "lstm": {
        "network": "lstm",
        "frame_size": 42,
        "frame_stack": 1,
        "crop": True,
        "rollout_steps": 40,
        "epochs": 2,
        "lr_final": 0.15,
        "schedule_end": 0.4,
        "adam_eps": 1e-5,
        "max_grad_norm": 2.0,  # hardly ever reached: most norms are below 0.4 on Pong
        "max_episode_frames": 40_000,
        "total_env_steps": 1_500_000,
    },
    "cartpole-lstm": {
        **ONCE,
        "env": "CartPole-v1",
        "backend": "sync",
        "num_envs": 16,
        "threads": 1,
        "network": "lstm",
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
    # Lapan (2018), "Deep Reinforcement Learning Hands-On", chapter 10; learning rate and batch as tuned there.
    "book": {
        **ONCE,
        "rollout_steps": 4,
        "num_minibatches": 1,
        "sliding_batch": 32,
        "gae_lambda": 1.0,
        "learning_rate": 0.003,
        "adam_eps": 1e-3,
        "lr_final": 1.0,
        "entropy_coef": 0.03,
        "value_coef": 1.0,
        "max_grad_norm": 0.1,
        "normalize_obs": False,
        "total_env_steps": 10_000_000,
    },
}

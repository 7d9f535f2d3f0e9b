"""Settings that change over a run, as functions of the decisions that were taken so far."""

from __future__ import annotations

from a2c.config.config import Config


def learning_rate(config: Config, env_steps: int) -> float:
    """The learning rate after `env_steps` decisions: linear to the share `lr_final`, then constant."""
    return config.learning_rate * _fallen_to(config.lr_final, _progress(config, env_steps))


def entropy_coef(config: Config, env_steps: int) -> float:
    """The weight of the entropy bonus after `env_steps` decisions: held, linear to `entropy_final`, then constant."""
    hold, progress = config.entropy_hold, _progress(config, env_steps)
    return config.entropy_coef * _fallen_to(config.entropy_final, max(0.0, progress - hold) / max(1.0 - hold, 1e-9))


def exploration_noise(config: Config, env_steps: int) -> float:
    """The scale of the noise on the logits after `env_steps` decisions: linear to 0 at `exploration_end`."""
    return config.exploration_noise * max(0.0, 1.0 - env_steps / (config.exploration_end * config.total_env_steps))


def _progress(config: Config, env_steps: int) -> float:
    """The part of the schedules that is over, 0 to 1."""
    return min(1.0, env_steps / (config.schedule_end * config.total_env_steps))


def _fallen_to(final: float, progress: float) -> float:
    """1 at the beginning, `final` at the end; exactly 1 throughout where `final` is 1."""
    return 1.0 - progress + final * progress if final < 1.0 else 1.0

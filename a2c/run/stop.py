"""When a run ends, and why."""

from __future__ import annotations

from a2c.config.config import Config
from a2c.metrics.meters import ScoreWindow
from a2c.metrics.text import format_score
from a2c.processes.signals import StopRequest


def stop_reason(config: Config, env_steps: int, scores: ScoreWindow, stop: StopRequest) -> str:
    """Why the run ends at `env_steps`, in a few words; an empty string while it continues."""
    if stop:
        return f"stopped by {stop.name}"
    if finished := finish_reason(config, env_steps, scores):
        return finished
    return f"stopped after {env_steps:,} env_steps" if config.stop_after and env_steps >= config.stop_after else ""


def finish_reason(config: Config, env_steps: int, scores: ScoreWindow) -> str:
    """Why nothing is left to do at `env_steps`; an empty string if there is."""
    if config.target_score is not None and scores.meets(config.target_score):
        return f"reached a mean score of {format_score(scores.reached)}"
    return "all environment steps done" if env_steps >= config.total_env_steps else ""

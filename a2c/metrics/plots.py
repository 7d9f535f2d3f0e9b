"""The learning curve of a run, drawn from its episodes.csv."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from a2c.metrics.files import write_atomically
from a2c.metrics.meters import WINDOW
from a2c.metrics.results import moving_mean, read_episodes
from a2c.metrics.text import format_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS = 200_000  # episodes that are drawn as points, at most


def draw_curve(run_dir: Path, title: str, target: float | None = None) -> Path | None:
    """Draw score against env_steps into curve.png and return its path; None while no episode is finished."""
    episodes = read_episodes(run_dir)
    if len(episodes["score"]) == 0:
        return None
    from matplotlib.figure import Figure  # slow to import

    steps = episodes["env_steps"] / 1e6
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    every = slice(None, None, 1 + len(steps) // DOTS)
    axes.plot(steps[every], episodes["score"][every], ".", ms=3, alpha=0.35, color="tab:gray", label="one episode")
    mean = moving_mean(episodes["score"])
    axes.plot(steps[every], mean[every], lw=2, color="tab:blue", label=f"mean of the last {WINDOW} episodes")
    if target is not None:
        axes.axhline(target, ls="--", lw=1, color="tab:green", label=f"target {format_number(target)}")
    axes.set(xlabel="environment steps (million decisions)", ylabel="score (points of the game)", title=title)
    minutes = axes.secondary_xaxis(-0.16, functions=_steps_to_minutes(steps, episodes["seconds"] / 60))
    minutes.set_xlabel("wall time (minutes)")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=9)
    path = run_dir / "curve.png"
    write_atomically(path, picture(figure))
    return path


def picture(figure: Figure) -> bytes:
    """The content of a PNG file that shows the figure."""
    content = io.BytesIO()
    figure.savefig(content, dpi=120)
    return content.getvalue()


def _steps_to_minutes(steps: np.ndarray, minutes: np.ndarray) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Maps from steps to minutes and back, for the second horizontal axis: proportional, as if speed were constant."""
    rate = minutes[-1] / steps[-1] if steps[-1] > 0 and minutes[-1] > 0 else 1.0
    return (lambda x: x * rate), (lambda x: x / rate)

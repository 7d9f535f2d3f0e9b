"""Learning curves: of a run, drawn from its episodes.csv, and of several runs with the same settings."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from a2c.metrics.files import write_atomically
from a2c.metrics.meters import WINDOW
from a2c.metrics.results import interquartile_mean, interval_of_curves, median, moving_mean, read_episodes
from a2c.metrics.text import format_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS = 200_000  # episodes that are drawn as points, at most
POINTS = 500  # of a line that stands for several runs


class Curve(NamedTuple):
    """What is drawn of one run: two arrays `[points]` of finite values, `x` in rising order."""

    x: np.ndarray
    y: np.ndarray


class Band(NamedTuple):
    """What is drawn of several runs: at each `x [POINTS]` the middle of their values, and the ends of the band."""

    x: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def make_band(curves: Sequence[Curve], iqm: bool = False, interval: bool = False) -> Band:
    """The median of `curves`, or their interquartile mean (`iqm`), and their range, interpolated on a common grid.

    `interval`: in place of the range, the 95 % interval of the median or interquartile mean.

    It begins where the last curve begins and ends where half of them have ended; until then a curve that has ended
    keeps its last value. No curve may be empty.
    """
    start, end = max(curve.x[0] for curve in curves), median(np.array([curve.x[-1] for curve in curves]))
    x = np.linspace(start, max(start, end), POINTS)
    values = np.array([np.interp(x, *curve) for curve in curves])
    middle = interquartile_mean if iqm else partial(np.median, axis=0)
    ends = interval_of_curves(values, middle) if interval else (values.min(axis=0), values.max(axis=0))
    return Band(x, middle(values), *ends)


def draw_runs(
    axes: Any,
    curves: Sequence[Curve],
    colour: Any,
    label: str | None = None,
    iqm: bool = False,
    interval: bool = False,
) -> None:
    """Draw runs that differ in the seed: `make_band` of several, one as it is; of none, only the label is shown."""
    if len(curves) > 1:
        band = make_band(curves, iqm, interval)
        axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.15, lw=0)
        line = Curve(band.x, band.middle)
    else:
        line = curves[0] if curves else Curve(np.empty(0), np.empty(0))
    every = slice(None, None, 1 + len(line.x) // DOTS)
    axes.plot(line.x[every], line.y[every], color=colour, lw=2, label=label)


def time_unit(longest: float) -> tuple[str, float]:
    """Title of an axis of wall time up to `longest` seconds, and the seconds in one unit of it."""
    return ("wall time (seconds)", 1.0) if longest < 120 else ("wall time (minutes)", 60.0)


def colours(count: int) -> Callable[[int], Any]:
    """A function from 0, 1, ... to `count` colours that can be told apart."""
    from matplotlib import colormaps

    return colormaps["tab10"] if count <= 10 else colormaps["turbo"].resampled(count)


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


def picture(figure: Figure, kind: str = "png") -> bytes:
    """The content of a file of this `kind` (png or svg) that shows the figure."""
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format=kind)
    return content.getvalue()


def _steps_to_minutes(steps: np.ndarray, minutes: np.ndarray) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Maps from steps to minutes and back, for the second horizontal axis: proportional, as if speed were constant."""
    rate = minutes[-1] / steps[-1] if steps[-1] > 0 and minutes[-1] > 0 else 1.0
    return (lambda x: x * rate), (lambda x: x / rate)

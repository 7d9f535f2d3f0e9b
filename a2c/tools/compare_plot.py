"""The learning curves of a comparison in one picture: against decisions and against wall time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from a2c.metrics.console import format_score
from a2c.metrics.files import write_atomically
from a2c.metrics.meters import WINDOW
from a2c.metrics.plots import picture
from a2c.metrics.results import moving_mean
from a2c.tools.runs import Run
from a2c.tools.summary import Row, read_finished

POINTS = 500  # of a line
AXES = ("env_steps", "seconds")


def draw(out: Path, runs: Sequence[Run], summaries: Sequence[Row]) -> None:
    """Write compare.png: a colour per setting, a thin line per seed, a thick one for the median over the seeds.

    In the median a run that has ended keeps its last mean.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(11, 4.5 + 0.2 * len(summaries)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    colours = colormaps["tab10"] if len(summaries) <= 10 else colormaps["turbo"].resampled(len(summaries))
    longest = 0.0
    for place, summary in enumerate(summaries):
        curves = [curve for run in runs if run.setting == summary["setting"] and (curve := _curve(out / run.name))]
        longest = max([longest, *(curve["seconds"][-1] for curve in curves)])
        for axis, name in zip(axes, AXES, strict=True):
            _draw_setting(axis, [(curve[name], curve["mean"]) for curve in curves], colours(place))
        axes[0].plot([], [], lw=2, color=colours(place), label=_label(summary))  # in the legend, curves or not
    for axis in axes:
        for target in {row["target"] for row in summaries} - {""}:
            axis.axhline(target, ls="--", lw=1, color="gray")
        axis.grid(alpha=0.3)
    unit, length = ("seconds", 1) if longest < 120 else ("minutes", 60)
    axes[0].xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}")
    axes[1].xaxis.set_major_formatter(lambda value, _: f"{value / length:g}")
    axes[0].set(xlabel="environment steps (million decisions)", ylabel=f"mean score of the last {WINDOW} episodes")
    axes[1].set(xlabel=f"wall time ({unit})")
    figure.legend(loc="outside lower left", fontsize=8)
    figure.suptitle(_title(runs))
    write_atomically(out / "compare.png", picture(figure))


def _curve(run_dir: Path) -> dict[str, np.ndarray]:
    """Decisions, seconds and moving mean of a run; empty where no episode is finished."""
    try:
        episodes = read_finished(run_dir)
    except (OSError, ValueError):  # it failed before
        return {}
    curve = {name: episodes[name] for name in AXES} | {"mean": moving_mean(episodes["score"])}
    return curve if len(curve["mean"]) else {}


def _draw_setting(axes: Any, curves: Sequence[tuple[np.ndarray, np.ndarray]], colour: Any) -> None:
    for x, mean in curves:
        every = slice(None, None, 1 + len(x) // POINTS)
        alone = len(curves) == 1
        axes.plot(x[every], mean[every], color=colour, lw=2 if alone else 0.7, alpha=1 if alone else 0.4)
    if len(curves) > 1:
        grid = np.linspace(max(x[0] for x, _ in curves), max(x[-1] for x, _ in curves), POINTS)
        median = np.median([np.interp(grid, x, mean) for x, mean in curves], axis=0)
        axes.plot(grid, median, color=colour, lw=2)


def _label(summary: Row) -> str:
    """Setting, number of runs that reach the target, and their median; or the best mean where there is no target."""
    if summary["target"] == "":
        best = format_score(float(summary["median_best"] or "nan"))
        return f"{summary['setting']}: {summary['runs']} runs, best mean {best}"
    steps = summary["median_steps_to_target"]
    median = f"median {steps:,.0f} decisions" if np.isfinite(steps) else f"median above {summary['budget']:,}"
    return f"{summary['setting']}: {summary['solved']} of {summary['runs']} reach {summary['target']:g}, {median}"


def _title(runs: Sequence[Run]) -> str:
    seeds = sorted({run.config.seed for run in runs})
    named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if len(seeds) <= 5 else f"{len(seeds)} seeds"
    return f"{', '.join(dict.fromkeys(run.config.env for run in runs))}: {named}"

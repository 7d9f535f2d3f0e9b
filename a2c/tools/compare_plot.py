"""The learning curves of a comparison in one picture: against decisions and against wall time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from a2c.metrics.files import write_atomically
from a2c.metrics.meters import WINDOW
from a2c.metrics.plots import picture
from a2c.metrics.results import median, moving_mean
from a2c.tools.runs import Run
from a2c.tools.summary import Row, read_finished, show_score

POINTS = 500  # of a line


def draw(out: Path, runs: Sequence[Run], summaries: Sequence[Row]) -> None:
    """Write compare.png: a colour per setting, a thin line per seed, a thick one for the median over the seeds.

    The median ends where half of the runs have ended; until then a run that has ended keeps its last mean.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(11, 4.5 + 0.1 * len(summaries)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours = colormaps["tab10"] if len(summaries) <= 10 else colormaps["turbo"].resampled(len(summaries))
    curves = {run.name: _curve(out / run.name) for run in runs}
    longest = max((seconds[-1] for _, seconds, means in curves.values() if len(means)), default=0.0)
    unit, length = ("seconds", 1) if longest < 120 else ("minutes", 60)
    for place, summary in enumerate(summaries):
        shown = [curves[run.name] for run in runs if run.setting == summary["setting"] and len(curves[run.name][0])]
        _draw_setting(left, [(steps / 1e6, means) for steps, _, means in shown], colours(place))
        _draw_setting(right, [(seconds / length, means) for _, seconds, means in shown], colours(place))
        left.plot([], [], lw=2, color=colours(place), label=_label(summary))  # in the legend, curves or not
    for axes in (left, right):
        for target in {row["target"] for row in summaries} - {""}:
            axes.axhline(target, ls="--", lw=1, color="gray")
        axes.grid(alpha=0.3)
    left.set(xlabel="environment steps (million decisions)", ylabel=f"mean score of the last {WINDOW} episodes")
    right.set(xlabel=f"wall time ({unit})")
    figure.legend(loc="outside lower center", ncols=1 if len(summaries) < 3 else 2, fontsize=8)
    figure.suptitle(_title(runs))
    write_atomically(out / "compare.png", picture(figure))


def _curve(run_dir: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decisions, seconds and moving mean at the episodes of a run; empty where it has failed before the first."""
    try:
        episodes = read_finished(run_dir)
    except (OSError, ValueError):
        return np.empty(0), np.empty(0), np.empty(0)
    return episodes["env_steps"], episodes["seconds"], moving_mean(episodes["score"])


def _draw_setting(axes: Any, curves: Sequence[tuple[np.ndarray, np.ndarray]], colour: Any) -> None:
    for x, means in curves:
        every = slice(None, None, 1 + len(x) // POINTS)
        alone = len(curves) == 1
        axes.plot(x[every], means[every], color=colour, lw=2 if alone else 0.7, alpha=1 if alone else 0.4)
    if len(curves) > 1:
        grid = np.linspace(max(x[0] for x, _ in curves), median(np.array([x[-1] for x, _ in curves])), POINTS)
        axes.plot(grid, np.median([np.interp(grid, x, means) for x, means in curves], axis=0), color=colour, lw=2)


def _label(summary: Row) -> str:
    """Setting, number of runs that reach the target, and their median; or the best mean where there is no target."""
    if summary["target"] == "":
        best = show_score(summary["median_best"])
        return f"{summary['setting']}: {summary['runs']} run{'s' * (summary['runs'] > 1)}, best mean {best}"
    steps = summary["median_steps_to_target"]
    middle = f"median {steps:,.0f} decisions" if np.isfinite(steps) else f"median above {summary['budget']:,}"
    return f"{summary['setting']}: {summary['solved']} of {summary['runs']} reach {summary['target']:g}, {middle}"


def _title(runs: Sequence[Run]) -> str:
    seeds = sorted({run.config.seed for run in runs})
    named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if len(seeds) <= 5 else f"{len(seeds)} seeds"
    return f"{', '.join(dict.fromkeys(run.config.env for run in runs))}: {named}"

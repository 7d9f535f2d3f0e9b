"""The learning curves of a comparison in one picture: against decisions and against wall time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from a2c.metrics.files import write_atomically
from a2c.metrics.meters import WINDOW
from a2c.metrics.plots import Curve, colours, draw_runs, picture, time_unit
from a2c.tools.read_run import Series, read_series
from a2c.tools.runs import Run
from a2c.tools.summary import Row, show_score


def draw(out: Path, runs: Sequence[Run], summaries: Sequence[Row]) -> None:
    """Write compare.png: a colour per setting, a line for the median over the seeds, a band from lowest to highest."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(11, 4.5 + 0.1 * len(summaries)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colour_of = colours(len(summaries))
    curves: dict[str, Series] = {}
    for run in runs:
        with suppress(OSError, ValueError):  # it has failed before its first episode
            curves[run.name] = read_series(out / run.name)
    longest = max((curve.seconds[-1] for curve in curves.values() if len(curve.values)), default=0.0)
    title, unit = time_unit(longest)
    for place, summary in enumerate(summaries):
        named = [curves[run.name] for run in runs if run.setting == summary["setting"] and run.name in curves]
        shown = [curve for curve in named if len(curve.values)]
        draw_runs(left, [Curve(steps / 1e6, means) for steps, _, means in shown], colour_of(place), _label(summary))
        draw_runs(right, [Curve(seconds / unit, means) for _, seconds, means in shown], colour_of(place))
    for axes in (left, right):
        for target in {row["target"] for row in summaries} - {""}:
            axes.axhline(target, ls="--", lw=1, color="gray")
        axes.grid(alpha=0.3)
    left.set(xlabel="environment steps (million decisions)", ylabel=f"mean score of the last {WINDOW} episodes")
    right.set(xlabel=title)
    note = "line: median of the seeds, band: lowest to highest" if len(runs) > len(summaries) else None
    columns = 1 if len(summaries) < 3 else 2
    figure.legend(title=note, loc="outside lower center", ncols=columns, fontsize=8, title_fontsize=8)
    figure.suptitle(_title(runs))
    write_atomically(out / "compare.png", picture(figure))


def _label(summary: Row) -> str:
    """Setting, number of runs that reach the target, and their median; or the best mean where there is no target."""
    if summary["target"] == "":
        best = show_score(summary["median_best"])
        return f"{summary['setting']}: {summary['runs']} run{'s' * (summary['runs'] > 1)}, best mean {best}"
    steps = summary["median_steps_to_target"]
    if np.isfinite(steps):
        middle = f"median {steps:,.0f} decisions"
    else:
        middle = f"median above {summary['budget']:,}" if summary["budget"] else "not trained"
    return f"{summary['setting']}: {summary['solved']} of {summary['runs']} reach {summary['target']:g}, {middle}"


def _title(runs: Sequence[Run]) -> str:
    seeds = sorted({run.config.seed for run in runs})
    named = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if len(seeds) <= 5 else f"{len(seeds)} seeds"
    return f"{', '.join(dict.fromkeys(run.config.env for run in runs))}: {named}"

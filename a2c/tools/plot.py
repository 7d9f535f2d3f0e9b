"""Plot: one metric of many runs in one picture; runs that differ only in the seed share a line and a band."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from a2c.config.config import MAY_CHANGE
from a2c.config.validation import check_choice, check_out
from a2c.metrics.files import read_object, write_atomically
from a2c.metrics.logger import METRICS
from a2c.metrics.plots import Curve, colours, draw_runs, picture, time_unit
from a2c.metrics.text import format_number
from a2c.tools.read_run import SCORE, frames_per_decision, number_in, read_series

KINDS = (".png", ".svg")
NAMES = ("env", "preset", "algorithm")  # settings by which groups are named if that tells them apart
MOST = 4  # settings in the name of a group
X = Literal["decisions", "frames", "seconds"]


class Middle(NamedTuple):
    """How several runs are drawn: a line for the median or interquartile mean, a band for its interval or the range."""

    iqm: bool = False
    interval: bool = False


class Plotted(NamedTuple):
    """What a picture shows."""

    runs: int
    groups: int
    left_out: list[Path]  # run directories of a comparison without a value yet
    repeated: list[Path]  # runs with the settings and the seed of another one


@dataclass(frozen=True)
class PlottedRun:
    """One run: its directory, its settings as in config.json, and its curve against decisions and seconds."""

    run_dir: Path
    settings: dict[str, Any]
    env_steps: np.ndarray  # [points]
    seconds: np.ndarray  # [points]
    values: np.ndarray  # [points]

    def curve(self, x: X, per_unit: float) -> Curve:
        """The curve against `x`, of which `per_unit` make one unit of the axis."""
        frames = frames_per_decision(self.settings.get("env")) if x == "frames" else 1
        return Curve((self.seconds if x == "seconds" else self.env_steps * frames) / per_unit, self.values)

    def group(self) -> str:
        """The settings, but for the seed and those that may change when a run continues, as text to compare."""
        kept = {name: value for name, value in self.settings.items() if name not in ("seed", *MAY_CHANGE)}
        return json.dumps(kept, sort_keys=True) if kept else str(self.run_dir)


def plot(
    paths: Sequence[Path], out: Path, x: X = "decisions", metric: str = SCORE, iqm: bool = False, interval: bool = False
) -> Plotted:
    """Draw `metric` of the runs in `paths` against `x` to `out`, a PNG or SVG file.

    A path is a run directory, or one that holds run directories, such as that of a comparison. Runs with the same
    settings but for the seed are one group: a line for their median, or interquartile mean (`iqm`), and a band from
    the lowest to the highest, or the line's 95 % interval (`interval`). Raises ValueError for a bad argument and for a
    run without a value of `metric`, OSError if a file cannot be read or written.
    """
    check_choice("metric", metric, tuple(METRICS))
    check_out(out, KINDS)
    runs, left_out = read_runs(paths, metric)
    groups: dict[str, list[PlottedRun]] = {}
    for run in runs:
        groups.setdefault(run.group(), []).append(run)
    _draw(list(groups.values()), out, x, metric, Middle(iqm, interval))
    repeated = [run.run_dir for group in groups.values() for run in _repeated(group)]
    return Plotted(len(runs), len(groups), left_out, repeated)


def _repeated(group: Sequence[PlottedRun]) -> list[PlottedRun]:
    seeds = [run.settings.get("seed") for run in group]
    return [run for place, run in enumerate(group) if seeds[place] in seeds[:place]]


def read_runs(paths: Sequence[Path], metric: str) -> tuple[list[PlottedRun], list[Path]]:
    """The runs in `paths`, and the run directories below one of them that have no value of `metric` yet."""
    if not paths:
        raise ValueError("runs must be one directory or more, got none")
    found = {run_dir.resolve(): (run_dir, path) for path in paths for run_dir in run_dirs(path)}
    runs, left_out = [], []
    for run_dir, path in found.values():
        run = _read_run(run_dir, metric)
        if len(run.values):
            runs.append(run)
        elif run_dir == path or len(paths) == len(found) == 1:
            raise ValueError(f"{_missing(run_dir, metric)}, got none yet")
        else:
            left_out.append(run_dir)
    if not runs:
        raise ValueError(f"{_missing(left_out[0], metric)}, got none yet in {len(left_out)} runs")
    return runs, left_out


def run_dirs(path: Path) -> list[Path]:
    """`path` where it is a run directory, else the run directories one or two levels below it, as in a comparison."""
    if not path.is_dir():
        raise ValueError(f"run_dir must be a directory that exists, got {str(path)!r}")
    if _is_run(path):
        return [path]
    below = [run_dir for pattern in ("*", "*/*") for run_dir in path.glob(pattern) if _is_run(run_dir)]
    if not below:
        raise ValueError(f"run_dir must hold episodes.csv, or directories of runs, got {str(path)!r}")
    return sorted(below, key=_in_order_of_seeds)


def _is_run(path: Path) -> bool:
    return (path / "episodes.csv").is_file() or (path / "config.json").is_file()


def _in_order_of_seeds(run_dir: Path) -> tuple[Path, int, str]:
    number = run_dir.name.rpartition("-")[2]
    return run_dir.parent, int(number) if number.isdecimal() else -1, run_dir.name


def _read_run(run_dir: Path, metric: str) -> PlottedRun:
    return PlottedRun(run_dir, read_object(run_dir / "config.json"), *read_series(run_dir, metric))


def _missing(run_dir: Path, metric: str) -> str:
    return f"{run_dir} must have {'a finished episode' if metric == SCORE else f'a value of {metric}'}"


def _draw(groups: Sequence[Sequence[PlottedRun]], out: Path, x: X, metric: str, middle: Middle) -> None:
    from matplotlib.figure import Figure  # slow to import

    runs = [run for group in groups for run in group]
    figure = Figure(figsize=(8, 4.5 + 0.2 * len(groups)), layout="constrained")
    axes = figure.subplots()
    title, per_unit = _unit(x, max(run.curve(x, 1.0).x[-1] for run in runs))
    colour_of = colours(len(groups))
    for place, (name, group) in enumerate(zip(group_names(groups), groups, strict=True)):
        draw_runs(
            axes, [run.curve(x, per_unit) for run in group], colour_of(place), _label(name, group, middle), *middle
        )
    if metric == SCORE:
        targets = {number_in(run.settings, "target_score") for run in runs}
        for target in sorted(value for value in targets if value is not None):
            axes.axhline(target, ls="--", lw=1, color="gray", label=f"target {format_number(target)}")
    axes.set(xlabel=title, ylabel=textwrap.fill(METRICS[metric], 44), title=_title(runs))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8)
    try:
        drawn = picture(figure, out.suffix[1:])
    except RuntimeError as error:  # such as a matplotlibrc that asks for LaTeX, which is not there
        raise OSError(f"{out} could not be drawn: {error}") from error
    write_atomically(out, drawn)


def _unit(x: X, longest: float) -> tuple[str, float]:
    """Title of the axis, and how many of `x` make one unit of it."""
    if x == "seconds":
        return time_unit(longest)
    what = "decisions" if x == "decisions" else "emulator frames"
    word, size = (" (millions)", 1e6) if longest >= 1e6 else (" (thousands)", 1e3) if longest >= 1e4 else ("", 1.0)
    return what + word, size


def group_names(groups: Sequence[Sequence[PlottedRun]]) -> list[str]:
    """What tells the groups apart: the settings that differ between them, else their directories."""
    first = [group[0] for group in groups]
    names = {name for run in first for name in run.settings} - {"seed", *MAY_CHANGE}
    differ = sorted(name for name in names if len({str(run.settings.get(name)) for run in first}) > 1)
    plain = [name for name in NAMES if name in differ or (len(groups) == 1 and name == "preset")]
    by_name = [", ".join(str(run.settings.get(name)) for name in plain) for run in first]
    by_setting = [", ".join(f"{name}={run.settings.get(name)}" for name in differ) for run in first]
    by_directory = [str(group[0].run_dir.parent if len(group) > 1 else group[0].run_dir) for group in groups]
    for made, usable in ((by_name, plain), (by_setting, 0 < len(differ) <= MOST)):
        if usable and len(set(made)) == len(groups):
            return made
    return by_directory


def _label(name: str, group: Sequence[PlottedRun], middle: Middle) -> str:
    if len(group) == 1:
        return _plain(f"{name}, seed {group[0].settings.get('seed', 'unknown')}")
    line, band = ("interquartile mean" if middle.iqm else "median"), "lowest to highest"
    band = "95 % interval" if middle.interval else band
    return _plain(f"{name}: {line} of {len(group)} runs, band: {band}")


def _title(runs: Sequence[PlottedRun]) -> str:
    return _plain(", ".join(dict.fromkeys(str(run.settings.get("env", run.run_dir)) for run in runs)))


def _plain(text: str) -> str:
    """`text` for matplotlib, which takes dollar signs for formulas and leaves what begins with _ out of a legend."""
    return ("./" if text.startswith("_") else "") + text.replace("$", r"\$")

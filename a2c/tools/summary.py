"""The results of a comparison: a row per run in compare.csv, a row per setting in summary.csv and on the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from a2c.metrics.files import read_table, write_atomically
from a2c.metrics.meters import WINDOW
from a2c.metrics.results import (
    best_mean,
    finite_rows,
    first_passage,
    interval_of_median,
    median,
    moving_mean,
    read_finite_episodes,
)
from a2c.metrics.text import format_duration, format_score
from a2c.tools.frozen import first_frozen
from a2c.tools.runs import Run

Row = dict[str, Any]
OUT_OF_TIME = 124  # exit status, as that of timeout(1), of a run that a budget of time has ended
FIGURES = (  # of a run; speeds are means over the whole run, without the start of its workers
    *("env_steps", "seconds", "steps_per_second", "updates_per_second", "best", "last"),
    *("steps_to_target", "seconds_to_target"),
    *("frozen_steps_to_target", "policy_lag"),
)


def row_of(out: Path, run: Run, exit_status: int) -> Row:
    """The row of a run in compare.csv; what a run that failed never wrote is empty.

    OSError or ValueError if the tables of a run that has not failed cannot be read.
    """
    empty: Row = {"setting": run.setting, **run.varied, "seed": run.config.seed, **dict.fromkeys(FIGURES, "")}
    try:
        figures = _figures(out / run.name, run.config.target_score)
    except (OSError, ValueError):
        if exit_status == 0:
            raise
        figures = {}
    return empty | figures | {"exit_status": exit_status}


def _figures(run_dir: Path, target: float | None) -> Row:
    episodes, last = read_finite_episodes(run_dir), _last_row(run_dir / "metrics.csv")
    lags, best = read_table(run_dir / "metrics.csv", ("policy_lag",))["policy_lag"], best_mean(episodes)
    lags, means = lags[np.isfinite(lags)], moving_mean(episodes["score"])
    steps, seconds = (None if target is None else first_passage(episodes, target)) or ("", "")
    frozen = None if target is None else first_frozen(run_dir, target)
    return {
        "env_steps": int(last["env_steps"]),
        "seconds": round(last["seconds"], 1),
        "steps_per_second": round(last["env_steps"] / last["seconds"], 1),
        "updates_per_second": round(last["updates"] / last["seconds"], 1),
        "best": round(best, 2) if np.isfinite(best) else "",
        "last": round(float(means[-1]), 2) if len(means) else "",
        "steps_to_target": steps,
        "seconds_to_target": seconds,
        "frozen_steps_to_target": "" if frozen is None else frozen,
        "policy_lag": round(float(lags.mean()), 2) if len(lags) else "",
    }


def _last_row(path: Path) -> dict[str, float]:
    """env_steps, seconds and updates of a whole run; ValueError if no row of the table has all three."""
    table = finite_rows(read_table(path, ("env_steps", "seconds", "updates")))
    good = np.flatnonzero(np.all([values > 0 for values in table.values()], axis=0))
    if not len(good):
        raise ValueError(f"{path} must have a row with finite numbers above 0 in {', '.join(table)}")
    return {name: float(values[good[-1]]) for name, values in table.items()}


def summarise(runs: Sequence[Run], rows: Sequence[Row]) -> list[Row]:
    """A row per setting, over all its seeds; `rows` are those of the `runs`.

    A run that missed its target, failures included, took longer than any other: infinitely many decisions. One that
    has no mean of 100 episodes is worse than any other. Figures of a target are empty if there is none, those of
    frozen policies also if none were kept. The budget is that of the run with the least; see `_budget`.
    """
    return [
        _summary([run for run in runs if run.setting == name], [row for row in rows if row["setting"] == name])
        for name in dict.fromkeys(run.setting for run in runs)
    ]


def _summary(runs: Sequence[Run], rows: Sequence[Row]) -> Row:
    first, best, last = runs[0], _median_score(rows, "best"), _median_score(rows, "last")
    budgets = [_budget(run, row) for run, row in zip(runs, rows, strict=True)]
    has_target = first.config.target_score is not None
    steps = _missed_as_infinite(rows, "steps_to_target") if has_target else None
    seconds = _missed_as_infinite(rows, "seconds_to_target") if has_target else None
    frozen = _missed_as_infinite(rows, "frozen_steps_to_target") if first.keeps_policies else None
    return {
        "setting": first.setting,
        **first.varied,
        "runs": len(runs),
        "failed": sum(row["exit_status"] not in (0, OUT_OF_TIME) for row in rows),
        "target": first.config.target_score if has_target else "",
        "budget": min(filter(None, budgets), default=0),
        "solved": "" if steps is None else int(np.isfinite(steps).sum()),
        **_median("steps_to_target", steps),
        "worst_steps_to_target": "" if steps is None else steps.max(),
        "median_seconds_to_target": "" if seconds is None else median(seconds),
        "frozen_solved": "" if frozen is None else int(np.isfinite(frozen).sum()),
        **_median("frozen_steps_to_target", frozen),
        "median_best": best if np.isfinite(best) else "",
        "median_last": last if np.isfinite(last) else "",
    }


def _budget(run: Run, row: Row) -> int:
    """Decisions that a run was to make, or had made when it ran out of time: 0 if it had not begun."""
    return int(row["env_steps"] or 0) if row["exit_status"] == OUT_OF_TIME else run.budget


def _median_score(rows: Sequence[Row], name: str) -> float:
    return median(np.array([-np.inf if row[name] == "" else row[name] for row in rows]))


def _missed_as_infinite(rows: Sequence[Row], name: str) -> np.ndarray:
    return np.array([np.inf if row[name] == "" else float(row[name]) for row in rows])


def _median(name: str, values: np.ndarray | None) -> Row:
    """Median over the runs, and its 95 % interval."""
    names = (f"median_{name}", f"low_{name}", f"high_{name}")
    if values is None:
        return dict.fromkeys(names, "")
    return dict(zip(names, (median(values), *interval_of_median(values)), strict=True))


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows that have the same columns; whole numbers without a point."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    for row in rows:
        writer.writerow({k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in row.items()})
    write_atomically(path, text.getvalue().encode())


def make_table(summaries: Sequence[Row]) -> Table:
    """The table of `summarise` for a terminal; a column that is empty for all settings is left out."""
    caption = "medians over all seeds with 95 % intervals;\na run that missed its target counts as the longest"
    table = Table(caption=caption, show_lines=True)
    differ = len({row["budget"] for row in summaries}) > 1
    early = differ or any(row["median_best"] == "" for row in summaries)
    columns = {
        "setting": [row["setting"].replace(",", ",\n") for row in summaries],
        "decisions\nper run": [f"{row['budget']:,}" if differ else "" for row in summaries],
        "reach\ntarget": [f"{row['solved']} of {row['runs']}" if row["target"] != "" else "" for row in summaries],
        "decisions\nto target": [format_interval(row, "steps_to_target").replace(" (", "\n(") for row in summaries],
        "worst": [format_steps(row, "worst_steps_to_target") for row in summaries],
        "time\nto target": [_duration(row["median_seconds_to_target"]) for row in summaries],
        "frozen policy:\ndecisions to target": [
            format_interval(row, "frozen_steps_to_target").replace(" (", "\n(") for row in summaries
        ],
        f"last mean,\nup to {WINDOW}": [show_score(row["median_last"]) if early else "" for row in summaries],
        f"best mean\nof {WINDOW}": [show_score(row["median_best"]) for row in summaries],
        "failed": [str(row["failed"] or "") for row in summaries],
    }
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    for title in shown:
        table.add_column(title, justify="left" if title == "setting" else "right", overflow="fold")
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*cells)
    return table


def print_table(summaries: Sequence[Row]) -> None:
    """Print the table; it keeps its shape in a file or a pipe."""
    console = Console(highlight=False, markup=False)
    (console if console.is_terminal else Console(highlight=False, markup=False, width=160)).print(make_table(summaries))


def show_score(score: float | str) -> str:
    """A score of a row; a dash if it is empty."""
    return format_score(np.nan if isinstance(score, str) else score)


def format_steps(row: Row, name: str) -> str:
    """The decisions `row[name]` of a row of `summarise` for a table; more than the budget where they are infinite."""
    if row[name] == "":
        return ""
    if np.isfinite(row[name]):
        return f"{row[name]:,.0f}"
    return f"> {row['budget']:,}" if row["budget"] else "not trained"


def format_interval(row: Row, name: str) -> str:
    """The median of the figure `name` in a row of `summarise`, and its 95 % interval, for a table."""
    if row[f"median_{name}"] == "":
        return ""
    middle, low, high = (format_steps(row, f"{which}_{name}") for which in ("median", "low", "high"))
    return middle if low == high else f"{middle} ({low} to {high})"


def _duration(seconds: float | str) -> str:
    return seconds if isinstance(seconds, str) else format_duration(seconds)

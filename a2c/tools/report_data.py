"""What a report shows of a run: summary, model card, tables and series, as values that JSON has.

All of it is text or numbers; the page decides how they look.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from a2c.metrics.files import read_object, read_table
from a2c.metrics.logger import METRICS
from a2c.metrics.meters import EPISODE_COLUMNS, WINDOW
from a2c.metrics.results import best_mean, finite_rows, first_passage, moving_mean, read_finite_episodes
from a2c.metrics.text import format_duration, format_number, format_score
from a2c.tools.model_card import model_card
from a2c.tools.read_run import number_in, read_columns

Pairs = list[tuple[str, str]]  # a name and a text
Table = dict[str, np.ndarray]
POINTS = 3000  # of a series; of longer ones, as many that lie evenly apart
RUN_FILES = ("config.json", "episodes.csv", "metrics.csv")
SHOWN = (  # columns of metrics.csv that the page draws
    *("loss_policy", "loss_value", "loss_entropy", "entropy", "explained_variance", "approx_kl", "ratio"),
    "clip_fraction",
    *("share_env", "share_act", "share_learn"),
)

EVALUATED = ("mean", "min", "max")  # columns of evaluations.csv that it draws


def read_report(run_dir: Path) -> dict[str, Any]:
    """The content of the page for a run, which may not have written anything yet.

    Raises ValueError for a file that is damaged, OSError for one that cannot be read.
    """
    settings, about = read_object(run_dir / "config.json"), read_object(run_dir / "about.json")
    episodes, metrics = _read_episodes(run_dir), read_columns(run_dir / "metrics.csv", METRICS)
    summary = _summary(run_dir, settings, episodes, metrics)
    return {
        "title": str(settings.get("env", run_dir.resolve().name)),
        "summary": summary,
        "card": model_card(settings, dict(summary)),
        "config": _as_text(settings),
        "about": _as_text(about),
        "target": number_in(settings, "target_score"),
        "window": WINDOW,
        "episodes": _series(episodes | {"mean": moving_mean(episodes["score"])}, ("score", "mean")),
        "metrics": _series(metrics, SHOWN),
        "evaluations": _series(_read_evaluations(run_dir, episodes, metrics), EVALUATED),
    }


def check_run(run_dir: Path) -> None:
    """ValueError if `run_dir` is not the directory of a run."""
    if not run_dir.is_dir():
        raise ValueError(f"run_dir must be a directory that exists, got {str(run_dir)!r}")
    if not any((run_dir / name).is_file() for name in RUN_FILES):
        raise ValueError(f"run_dir must hold {' or '.join(RUN_FILES)} of one run, got {str(run_dir)!r}")


def _read_episodes(run_dir: Path) -> Table:
    try:
        return read_finite_episodes(run_dir)
    except FileNotFoundError:
        return {name: np.empty(0) for name in EPISODE_COLUMNS}


def _read_evaluations(run_dir: Path, *timed: Table) -> Table:
    """The rows of evaluations.csv, and the seconds at which the run had made such decisions, by the rows of `timed`."""
    table = read_columns(run_dir / "evaluations.csv", ("env_steps", *EVALUATED))
    known = [
        finite_rows({name: one[name] for name in ("env_steps", "seconds")})
        for one in timed
        if {"env_steps", "seconds"} <= set(one)
    ]
    steps, seconds = (np.concatenate([one[name] for one in known]) for name in ("env_steps", "seconds"))
    if "env_steps" not in table or not len(steps):
        return {}
    order = np.argsort(steps, kind="stable")
    return table | {"seconds": np.interp(table["env_steps"], steps[order], seconds[order])}


def _series(table: Table, names: tuple[str, ...]) -> dict[str, list[float | None]]:
    """At most `POINTS` rows of the named columns, with decisions and minutes; None for NaN and infinite values."""
    if not {"env_steps", "seconds"} <= set(table):
        return {}
    count = len(table["env_steps"])
    rows = np.unique(np.linspace(0, count - 1, min(count, POINTS)).astype(int))
    columns = {"env_steps": table["env_steps"], "minutes": table["seconds"] / 60}
    columns |= {name: table[name] for name in names if name in table}
    return {name: [_rounded(value) for value in values[rows]] for name, values in columns.items()}


def _rounded(value: float) -> float | None:
    """Six digits, and all of a whole number; None if JSON has no such number."""
    if not np.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")


def _summary(run_dir: Path, settings: dict[str, Any], episodes: Table, metrics: Table) -> Pairs:
    steps, seconds = (_last(name, metrics, episodes) for name in ("env_steps", "seconds"))
    total, best, means = number_in(settings, "total_env_steps"), best_mean(episodes), moving_mean(episodes["score"])
    window = min(WINDOW, len(means)) or WINDOW
    rows = [
        ("Game", str(settings.get("env", "-"))),
        ("Algorithm", str(settings.get("algorithm", "-"))),
        ("Preset", str(settings.get("preset", "-"))),
        ("Seed", str(settings.get("seed", "-"))),
        ("Decisions", f"{steps:,.0f}" + (f" of {total:,.0f}" if total else "")),
        ("Wall time", format_duration(seconds)),
        ("Episodes", f"{len(episodes['score']):,}"),
        (f"Best mean of {WINDOW} episodes", format_score(best)),
        ("Target", _target(settings, episodes)),
        (f"Mean of the last {window} episodes", format_score(means[-1] if len(means) else np.nan)),
        ("Last episode", format_number(episodes["score"][-1]) if len(means) else "-"),
    ]
    return rows + [("Evaluation", text) for text in _evaluations(run_dir)]


def _last(name: str, *tables: Table) -> float:
    """The largest value of a column that rises, in any of the tables; 0 without rows."""
    values = [table[name] for table in tables if name in table]
    return max((float(column[np.isfinite(column)].max(initial=0.0)) for column in values), default=0.0)


def _target(settings: dict[str, Any], episodes: Table) -> str:
    target = number_in(settings, "target_score")
    if target is None:
        return "none"
    if passage := first_passage(episodes, target):
        return f"{target:g} reached at {passage[0]:,} decisions, {format_duration(passage[1])}"
    return f"{target:g} not reached"


def _evaluations(run_dir: Path) -> list[str]:
    """A line for the last row of evaluations.csv, and one for evaluation.json (`a2c evaluate --json`)."""
    lines = []
    with suppress(FileNotFoundError):
        table = read_table(run_dir / "evaluations.csv", ("env_steps", "episodes", "mean"))
        for steps, episodes, mean in np.stack(list(table.values()), axis=1)[-1:]:
            lines.append(f"mean {mean:.2f} of {episodes:,.0f} episodes, policy after {steps:,.0f} decisions")
    try:
        evaluation = read_object(run_dir / "evaluation.json")
    except ValueError:  # empty while `a2c evaluate` plays
        return [*lines, "evaluation.json is not complete"]
    return [*lines, *_evaluation(evaluation)]


def _evaluation(result: dict[str, Any]) -> list[str]:
    mean, episodes, steps = (number_in(result, name) for name in ("mean", "episodes", "env_steps"))
    if mean is None or episodes is None:
        return []
    bounds = result.get("interval")
    interval = dict(zip(("low", "high"), bounds, strict=False)) if isinstance(bounds, list) else {}
    low, high = number_in(interval, "low"), number_in(interval, "high")
    known = f" (95 % interval {low:.2f} to {high:.2f})" if low is not None and high is not None else ""
    actions = "greedy" if result.get("actions") == "greedy" else "sampled"
    after = "" if steps is None else f", policy after {steps:,.0f} decisions"
    return [f"mean {mean:.2f}{known} of {episodes:,.0f} episodes, {actions} actions{after}"]


def _as_text(values: dict[str, Any]) -> Pairs:
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values.items()]

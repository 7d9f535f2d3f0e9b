"""The comparisons in results/ as Markdown tables, and what every table has: the line above it, rows in columns.

A comparison is a directory that `a2c compare` wrote and keep.py copied.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from a2c.metrics.text import format_duration
from a2c.tools.summary import Row, format_interval, format_steps

RESULTS = Path(__file__).parents[1] / "results"


def learning(*groups: Path) -> str:
    """Comparisons side by side: a row per setting, over all its seeds. Empty where there is no comparison.

    Without a column for frozen policies where none were kept.
    """
    if not groups:
        return ""
    target, settings = target_of(groups), [(group, row) for group in groups for row in read_rows(group / "summary.csv")]
    frozen = any(row["frozen_solved"] != "" for _, row in settings)
    header = (
        *("results", "environment", "setting", "solved", f"decisions to {target}: median (95 % interval)", "worst"),
        *([f"frozen policy at {target}: median (95 % interval)"] * frozen),
        *(f"median time to {target}", "decisions/s"),
    )
    jobs = {count for group in groups for count in listed(about(group)["jobs"])}
    pace = f" Runs at a time: {any_of(jobs)}"
    if not any(config_of(group, row).get("cuda") for group, row in settings):  # on a GPU, threads say little
        threads = {config_of(group, row)["threads"] or about(group)["cores"] for group, row in settings}
        pace += f"; compute threads of each: {any_of(threads)}"
    rows = [learned(group, row, frozen) for group, row in settings]
    return measured([about(group) for group in groups], f"{pace}.") + table(header, rows)


def learned(group: Path, row: Row, frozen: bool) -> Sequence[str]:
    """The cells of `learning` for a row of the group's summary.csv."""
    config, runs = config_of(group, row), runs_with(row, group)
    varied = f", `{row['setting']}`" if row["setting"] != config["preset"] else ""
    return (
        f"[{group.name}](results/{group.name})",
        f"`{config['env']}`",
        f"`{config['preset']}`{varied}",
        f"{row['solved']} of {row['runs']}",
        format_interval(row, "steps_to_target"),
        format_steps(row, "worst_steps_to_target"),
        *([format_interval(row, "frozen_steps_to_target")] * frozen),
        format_duration(row["median_seconds_to_target"]),
        f"{np.median([run['steps_per_second'] for run in runs if run['steps_per_second'] != '']):,.0f}",
    )


def search(*groups: Path) -> str:
    """Comparisons one by one: command, and a row per setting with the figures of every seed."""
    texts = []
    for group in groups:
        facts, summaries = about(group), read_rows(group / "summary.csv")
        seeds = list(dict.fromkeys(run["seed"] for run in read_rows(group / "compare.csv")))
        header = (f"decisions to {target_of([group])}", *(f"seed {seed}" for seed in seeds))
        rows = []
        for row in summaries:
            figures = {run["seed"]: figure(run, row["frozen_solved"] != "") for run in runs_with(row, group)}
            rows.append((f"`{row['setting']}`", *(figures.get(seed, "") for seed in seeds)))
        command = "\n".join(listed(facts["command"]))
        texts.append(f"```\n{command}\n```\n\n{measured([facts])}{table(header, rows)}")
    return "\n".join(texts)


def read_rows(path: Path) -> list[Row]:
    """compare.csv or summary.csv of a comparison, with numbers as numbers."""
    with open(path, newline="", encoding="utf-8") as file:
        return [{name: number(text) for name, text in row.items()} for row in csv.DictReader(file)]


def number(text: str) -> int | float | str:
    """The number that `text` is, else the text."""
    if text.isdecimal():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def runs_with(summary: Row, group: Path) -> list[Row]:
    """The rows of compare.csv that a row of summary.csv sums up."""
    return [run for run in read_rows(group / "compare.csv") if run["setting"] == summary["setting"]]


def config_of(group: Path, summary: Row) -> dict[str, Any]:
    """config.json of a run of one setting, as it was written: later versions may name its fields otherwise."""
    paths = sorted((group / str(summary["setting"])).glob("seed-*/config.json"))
    if not paths:
        raise ValueError(f"{group} must hold a config.json of a run with {summary['setting']}, got none")
    config: dict[str, Any] = json.loads(paths[0].read_text(encoding="utf-8"))
    return config


def target_of(groups: Iterable[Path]) -> str:
    """The target score that all settings of some comparisons share; ValueError where they do not."""
    targets = {str(row["target"]) for group in groups for row in read_rows(group / "summary.csv")}
    if len(targets) != 1 or "" in targets:
        raise ValueError(f"a table must hold runs with one target score, got {sorted(targets)}")
    return targets.pop()


def figure(run: Row, kept: bool) -> str:
    """Decisions to the target of a row of compare.csv; `kept`: and of the first policy that was good enough, frozen."""
    text, best, frozen = "failed" if run["exit_status"] else "never", run["best"], run["frozen_steps_to_target"]
    if run["steps_to_target"] != "":
        text = f"{run['steps_to_target']:,}"
    elif best != "":
        text += f" (best {best:.1f} in {run['env_steps']:,})"
    if not kept:
        return text
    return f"{text}; frozen never" if frozen == "" else f"{text}; frozen {frozen:,}"


def listed(fact: Any) -> list[Any]:
    """The values in turn of a fact in about.json, which is a list where it has changed."""
    return fact if isinstance(fact, list) else [fact]


def any_of(values: Iterable[int]) -> str:
    """Numbers for the line above a table."""
    return " or ".join(map(str, sorted(values)))


def about(group: Path) -> dict[str, Any]:
    """Commit, processor and versions of a group's runs."""
    facts: dict[str, Any] = json.loads((group / "about.json").read_text(encoding="utf-8"))
    return facts


def measured(machines: Sequence[dict[str, Any]], more: str = "") -> str:
    """The line above a table: commit, processor and GPU, which all its figures must share; then `more`."""
    facts = ("commit", "cores", "processor", "gpu", "torch")
    lines = {
        f"Commit {one['commit']}, {one['cores']} cores of {one['processor']}, "
        f"{f'{gpu}, ' if (gpu := one.get('gpu')) else ''}torch {one['torch']}."
        for one in machines
    }
    continued = any(isinstance(one.get(name), list) for one in machines for name in facts)
    if len(lines) != 1 or continued:  # a comparison that was continued elsewhere has a list
        raise ValueError(f"a table must hold one commit and one kind of processor, got {sorted(lines)}")
    return f"{lines.pop()}{more}\n\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

"""Train several algorithms with the same settings, one run after the other; one table and one plot of all runs."""

from __future__ import annotations

import csv
import dataclasses
import io
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from a2c.config.config import Config
from a2c.config.resolve import resolve
from a2c.envs.single import probe_spaces
from a2c.metrics.files import read_small, read_table, write_atomically
from a2c.metrics.meters import WINDOW
from a2c.metrics.plots import picture
from a2c.metrics.results import best_mean, first_passage, moving_mean, read_episodes
from a2c.processes.signals import StopRequest, stop_on_signals

COLOURS = {"a2c": "tab:blue", "a3c": "tab:orange", "ga3c": "tab:green"}
FREE = ("run_dir", "resume", "stop_after", "progress", "log_every")  # settings that may change when a run continues
COLUMNS = {
    "algorithm": "algorithm",
    "seed": "seed",
    "env_steps": "decisions",
    "seconds": "s",
    "steps_per_second": "decisions/s",
    "updates_per_second": "updates/s",
    "best": f"best mean/{WINDOW}",
    "steps_to_target": "to target",
    "seconds_to_target": "s to target",
    "policy_lag": "policy_lag",
}


def train_all(out: Path, runs: Mapping[str, Config], command: Sequence[str], flags: Sequence[str]) -> int:
    """Train the `runs`, by name, one after the other in processes of their own; `out / name` is the run directory.

    A run that `out` holds already is resumed, which does nothing where it has finished. `command` starts one
    training, given flags; `flags` are those that all new runs share. Returns the exit code of the first run that was
    stopped or failed, else 0.
    """
    request = StopRequest()
    with stop_on_signals(request):
        for name, config in runs.items():
            run_dir, algorithm, seed = out / name, config.algorithm, config.seed
            new = [*flags, "--algorithm", algorithm, "--seed", str(seed), "--run-dir", str(run_dir)]
            again = ["--resume", str(run_dir), "--stop-after", str(config.stop_after)]
            begun = (run_dir / "latest.pt").exists()
            print(f"--- {algorithm}, seed {seed}", flush=True)
            with subprocess.Popen([*command, *(again if begun else new)], stdin=subprocess.PIPE) as run:
                code = _wait(run, request)
            if code or request:
                return (code if code >= 0 else 128 - code) or 128 + request.number
    return 0


def check_runs(out: Path, runs: Mapping[str, Config]) -> None:
    """ValueError where a run that `out` holds already has other settings than in `runs`, or is a symbolic link."""
    for name, config in runs.items():
        if (out / name).is_symlink():
            raise ValueError(f"{out / name} must not be a symbolic link; remove it or use another out")
        try:
            saved = _config(out / name)
        except FileNotFoundError:
            continue
        config = resolve(config, probe_spaces(config).obs_shape)  # as in the run
        for field in dataclasses.fields(Config):
            was, now = getattr(saved, field.name), getattr(config, field.name)
            if field.name not in FREE and was != now:
                raise ValueError(f"{field.name} must be {was} as in the run {out / name}, got {now}: use another out")


def _config(run_dir: Path) -> Config:
    return Config.from_json(read_small(run_dir / "config.json"))


def _wait(run: subprocess.Popen[bytes], request: StopRequest) -> int:
    """The exit code of `run`. A request to stop is passed on to it (Ctrl-C reaches both processes anyway)."""
    asked = False
    while True:
        try:
            with suppress(subprocess.TimeoutExpired):
                return run.wait(timeout=0.5)
        except KeyboardInterrupt:  # the second Ctrl-C; the run may have received neither
            run.send_signal(signal.SIGINT)
            raise
        if request and not asked:
            asked = True
            run.terminate()


def summarise(out: Path, algorithms: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row of COLUMNS per run. Speeds are means over the whole run, without the start of its workers."""
    rows = []
    for algorithm in algorithms:
        for seed in seeds:
            run_dir = out / f"{algorithm}-{seed}"
            config, policy_lags = _config(run_dir), read_table(run_dir / "metrics.csv", ("policy_lag",))["policy_lag"]
            episodes, last = _finite(read_episodes(run_dir)), _last_row(run_dir / "metrics.csv")
            best = best_mean(episodes)
            reached = None if config.target_score is None else first_passage(episodes, config.target_score)
            seconds, policy_lags = last["seconds"], policy_lags[np.isfinite(policy_lags)]
            rows.append(
                {
                    "algorithm": algorithm,
                    "seed": seed,
                    "env_steps": int(last["env_steps"]),
                    "seconds": round(seconds, 1),
                    "steps_per_second": round(last["env_steps"] / seconds, 1),
                    "updates_per_second": round(last["updates"] / seconds, 1),
                    "best": round(best, 2) if np.isfinite(best) else "",
                    "steps_to_target": reached[0] if reached else "",
                    "seconds_to_target": reached[1] if reached else "",
                    "policy_lag": round(float(policy_lags.mean()), 2) if len(policy_lags) else "",
                }
            )
    return rows


def _last_row(path: Path) -> dict[str, float]:
    """env_steps, seconds and updates of a whole run; ValueError where no row of the table has all three."""
    table = _finite(read_table(path, ("env_steps", "seconds", "updates")))
    good = np.flatnonzero(np.all([values > 0 for values in table.values()], axis=0))
    if not len(good):
        raise ValueError(f"{path} must have a row with finite numbers above 0 in {', '.join(table)}")
    return {name: float(values[good[-1]]) for name, values in table.items()}


def _finite(table: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows whose values are all finite."""
    good = np.all([np.isfinite(values) for values in table.values()], axis=0)
    return {name: values[good] for name, values in table.items()}


def report(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write compare.csv, plot compare.png, print the table."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(out / "compare.csv", text.getvalue().encode())
    _draw(out, rows)
    table = Table()
    for title in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = (f"{value:,}" if isinstance(value, int | float) else str(value) or "-" for value in row.values())
        table.add_row(*cells)
    Console(width=max(Console().width, 130)).print(table)


def _draw(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure  # slow to import

    config = _config(out / f"{rows[0]['algorithm']}-{rows[0]['seed']}")
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    seeds = sorted({int(row["seed"]) for row in rows})
    unit, length = ("seconds", 1.0) if max(float(row["seconds"]) for row in rows) < 120.0 else ("minutes", 60.0)
    for row in rows:
        name = str(row["algorithm"])
        same = [r for r in rows if r["algorithm"] == name]
        speeds = (np.median([r[key] for r in same]) for key in ("steps_per_second", "updates_per_second"))
        label = None if row is not same[0] else "{}: {:,.0f} decisions/s, {:,.0f} updates/s".format(name, *speeds)
        episodes = read_episodes(out / f"{name}-{row['seed']}")
        means = moving_mean(episodes["score"])
        left.plot(episodes["env_steps"] / 1e6, means, color=COLOURS[name], lw=1.5, alpha=0.8, label=label)
        right.plot(episodes["seconds"] / length, means, color=COLOURS[name], lw=1.5, alpha=0.8)
    for axes in (left, right):
        if config.target_score is not None:
            axes.axhline(config.target_score, ls="--", lw=1, color="gray")
        axes.grid(alpha=0.3)
    left.set(xlabel="environment steps (million decisions)", ylabel=f"mean score of the last {WINDOW} episodes")
    right.set(xlabel=f"wall time ({unit})")
    left.legend(loc="best", fontsize=8)
    named = f"seeds {', '.join(map(str, seeds))}" if len(seeds) <= 5 else f"{len(seeds)} seeds"
    figure.suptitle(f"{config.env}, {named}")
    write_atomically(out / "compare.png", picture(figure))

"""Sweep: search a grid of settings within a budget, by successive halving."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from a2c.metrics.results import first_passage, median, moving_mean, read_finite_episodes
from a2c.tools.compare import opened, report
from a2c.tools.jobs import Jobs, print_line
from a2c.tools.runs import Run
from a2c.tools.summary import OUT_OF_TIME

UNITS = {"s": 1, "m": 60, "h": 3600}  # of a budget of wall time, in seconds


class Round(NamedTuple):
    """How many of the best settings it trains, and where their runs stop, whichever comes first."""

    settings: int
    share: float  # of a run's total_env_steps
    steps: float  # decisions of a run


def parse_budget(text: str | None) -> tuple[float | None, float]:
    """The decisions (None: no limit) and the seconds (infinite: no limit) of a budget such as 5e6, 90m or 2h."""
    if text is None:
        return None, math.inf
    number = re.fullmatch(r"(\d+\.?\d*(?:e\+?\d{1,2})?)([smh]?)", text.strip().lower())
    if not number or float(number[1]) == 0.0:
        raise ValueError(f"budget must be decisions such as 5e6, or a time such as 90m or 2h, got {text!r}")
    amount = float(number[1])
    return (None, amount * UNITS[number[2]]) if number[2] else (amount, math.inf)


def sweep(out: Path, runs: Sequence[Run], train: Sequence[str], jobs: int, command: str, budget: str | None) -> int:
    """Train all settings of `runs` for a while, the better half for longer, and so on; write and print all results.

    Successive halving (Jamieson & Talwalkar, 2016, "Non-stochastic best arm identification and hyperparameter
    optimization"): every round has an equal share of `budget` where that is in decisions; otherwise the last one ends
    with the runs' `total_env_steps`, each before it at half of the next. A budget of time ends the call. The same
    command continues a sweep. Parameters, return value and errors are those of `compare`.
    """
    decisions, seconds = parse_budget(budget)
    rounds = plan(runs, decisions)
    with opened(out, runs, command, jobs) as runs:
        work = Jobs(out, train, deadline=time.monotonic() + seconds)
        ranked, codes = list(dict.fromkeys(run.setting for run in runs)), dict[str, int]()
        reached = {run.name: run for run in runs}  # with the stop of the last round that it took part in
        for number, one in enumerate(rounds, start=1):
            todo = [until(run, one) for run in runs if run.setting in ranked[: one.settings]]
            print_line(f"round {number} of {len(rounds)}: {one.settings} settings, {len(todo)} runs, {_limits(todo)}")
            work.train_all(todo, jobs)
            reached |= {run.name: run for run in todo}
            # A failure of an earlier try stays one.
            earlier = {run.name: int(work.recorded(run, "exit_status") or OUT_OF_TIME) for run in todo}
            codes |= earlier | work.codes
            complete = len(work.codes) == len(todo)
            if complete or number == 1:  # else the order of the round before is the fairer one
                ranked[: one.settings] = by_result(out, todo, codes)
            if complete:
                continue
            if not work.out_of_time:
                print_line(f"stopped by {work.request.name} in round {number}; the same command continues")
                return 128 + work.request.number
            print_line(f"the budget of {budget} is used up in round {number}; the same command continues")
            break
        shown = [_as_trained(run, work.recorded(run, "stop_after")) for run in reached.values()]
        report(out, sorted(shown, key=lambda run: ranked.index(run.setting)), codes)
        return int(any(code not in (0, OUT_OF_TIME) for code in codes.values()))


def plan(runs: Sequence[Run], budget: float | None) -> list[Round]:
    """The rounds of a sweep of all `runs` with at most `budget` decisions together (None: no limit)."""
    settings = len({run.setting for run in runs})
    if settings < 2:
        raise ValueError(f"vary must make 2 settings or more, got {settings}")
    rounds = math.ceil(math.log2(settings))
    counts = [math.ceil(settings / 2**i) for i in range(rounds)]
    if budget is None:
        return [Round(count, 2.0 ** (i + 1 - rounds), math.inf) for i, count in enumerate(counts)]
    seeds = len(runs) // settings
    limits = np.cumsum([budget / (rounds * count * seeds) for count in counts])
    least = max(run.rollout for run in runs)
    if limits[0] < least:
        raise ValueError(f"budget must give each run a rollout of {least} decisions, got {limits[0]:,.0f}")
    return [Round(count, 1.0, float(limit)) for count, limit in zip(counts, limits, strict=True)]


def until(run: Run, end: Round) -> Run:
    """The run with a stop at the `end` of a round, after whole rollouts."""
    total = run.config.total_env_steps
    steps = min(end.share * total, end.steps)
    stop = total if steps >= total else max(run.rollout, int(steps // run.rollout) * run.rollout)
    return dataclasses.replace(_stopping(run, stop), flags=(*run.flags, "--stop-after", str(stop)))


def _as_trained(run: Run, stopped: float | None) -> Run:
    """The run with the stop in its status, if that is further: of another sweep, or 0, its end, of `compare`."""
    return run if stopped is None else _stopping(run, max(int(stopped), run.config.stop_after) if stopped else 0)


def _stopping(run: Run, stop: int) -> Run:
    return dataclasses.replace(run, config=dataclasses.replace(run.config, stop_after=stop))


def by_result(out: Path, runs: Sequence[Run], codes: Mapping[str, int]) -> list[str]:
    """The settings of `runs`, the best first; `codes`: exit status of each run, by its name."""
    standings: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        failed = codes[run.name] not in (0, OUT_OF_TIME)
        standings.setdefault(run.setting, []).append(_figures(out / run.name, run, failed))
    return sorted(standings, key=lambda setting: _medians(standings[setting]))


def _medians(figures: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Where a setting stands, lower is better: medians over its seeds, the later of which break ties of the first."""
    return tuple(median(np.array(values)) for values in zip(*figures, strict=True))


def _figures(run_dir: Path, run: Run, failed: bool) -> tuple[float, float]:
    """Decisions to the target, and minus the mean of the last (up to) 100 episodes, at the run's stop.

    Infinite if there is none; a run that has failed has no mean. No run has to have finished 100 episodes: where good
    ones are long, that would favour the poor settings.
    """
    try:
        episodes = read_finite_episodes(run_dir)
    except (OSError, ValueError):
        return math.inf, math.inf
    counted = episodes["env_steps"] < run.budget + run.rollout  # the rollout that reaches the budget counts
    episodes = {name: values[counted] for name, values in episodes.items()}
    means, target = moving_mean(episodes["score"]), run.config.target_score
    passage = None if target is None else first_passage(episodes, target)
    return passage[0] if passage else math.inf, -means[-1] if len(means) and not failed else math.inf


def _limits(runs: Sequence[Run]) -> str:
    low, high = min(run.budget for run in runs), max(run.budget for run in runs)
    return f"to {high:,} decisions" if low == high else f"to {low:,} to {high:,} decisions"

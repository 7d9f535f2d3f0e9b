"""The tables of what was tried, from results/*trials.csv: on Pong, with sticky actions, and on several games.

A row has a change of `pong-fast` or `atari`, and where its runs are kept. They are of many commits: they are kept to
show what was tried, not to compare small differences.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from comparisons import table

from a2c.metrics.results import best_mean, first_passage, median, read_episodes

LISTED = 7  # runs whose figures a cell names one by one; of more, it has the median and the range
SHORT = 20  # episodes of the mean that moves early
MARKS = (500_000, 1_000_000, 1_500_000, 2_000_000, 6_000_000, 10_000_000)  # where runs of several games are compared


def trials(path: Path) -> str:
    """A row per change: when the mean of 20 episodes reached 15, and that of 100 reached 18, in each of its runs."""
    header = ("change", "runs", f"decisions until the mean of {SHORT} episodes is 15", "decisions to 18")
    return table(header, [row_of(path.parent, *row) for row in read_rows(path)])


def sticky_trials(path: Path) -> str:
    """A row per change: how far its runs came with sticky actions, of what came after the decisions in `after`."""
    header = ("change", "decisions to 18", "best mean of 100 episodes", "mean of the last 100", "decisions at the end")
    return table(header, [sticky_row_of(path.parent, *row) for row in read_rows(path)])


def game_trials(path: Path) -> str:
    """A row per game and change: the mean of the 100 episodes that ended last before each of `MARKS`, in each run."""
    header = ("game", "change", "runs", *(f"after {mark / 1e6:g} million" for mark in MARKS))
    return table(header, [game_row_of(path.parent, *row) for row in read_rows(path)])


def game_row_of(results: Path, game: str, change: str, patterns: str) -> Sequence[str]:
    """The cells of a game and a change whose runs are in the directories that match `patterns`."""
    episodes = find_runs(results, patterns)
    means = ("; ".join(mean_at(one, mark) for one in episodes) for mark in MARKS)
    return game, change, str(len(episodes)), *means


def mean_at(episodes: dict[str, np.ndarray], mark: int) -> str:
    """The mean of the last 100 episodes after `mark` decisions; `-` where the last episode ended a tenth before it."""
    ended = episodes["env_steps"]
    return f"{episodes['score'][ended <= mark][-100:].mean():,.1f}" if ended[-1] >= 0.9 * mark else "-"


def read_rows(path: Path) -> list[list[str]]:
    """The rows of a CSV file, without its header."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def sticky_row_of(results: Path, change: str, patterns: str, after: str) -> Sequence[str]:
    """The cells of a change; only episodes that ended after as many decisions count."""
    episodes = [
        {name: values[one["env_steps"] > int(after)] for name, values in one.items()}
        for one in find_runs(results, patterns)
    ]
    best = [f"{best_mean(one):.1f}".replace("-inf", "-") for one in episodes]
    last = [f"{one['score'][-100:].mean():.1f}" for one in episodes]
    end = [f"{one['env_steps'][-1]:,.0f}" for one in episodes]
    return change, to_18(episodes), *("; ".join(cells) for cells in (best, last, end))


def find_runs(results: Path, patterns: str) -> list[dict[str, np.ndarray]]:
    """The episodes of the runs in the directories that match `patterns`, with a space between."""
    runs = [run for pattern in patterns.split() for run in sorted(results.glob(pattern))]
    if not runs:
        raise ValueError(f"runs must match directories in {results}, got {patterns}")
    return [read_episodes(run) for run in runs]


def row_of(results: Path, change: str, patterns: str) -> Sequence[str]:
    """The cells of a change whose runs are in the directories that match `patterns`."""
    episodes = find_runs(results, patterns)
    early = cell([passage(one, 15.0, SHORT) for one in episodes], [last_mean(one) for one in episodes])
    return change, str(len(episodes)), early, to_18(episodes)


def to_18(episodes: Sequence[dict[str, np.ndarray]]) -> str:
    """The cell with the decisions until the mean of 100 episodes is 18, in each run."""
    return cell([passage(one, 18.0, 100) for one in episodes], ["-"] * len(episodes))


def passage(episodes: dict[str, np.ndarray], target: float, window: int) -> float:
    """Decisions at the first episode where the mean of the last `window` is `target` or more; infinite without one."""
    reached = first_passage(episodes, target, window)
    return float(reached[0]) if reached else np.inf


def last_mean(episodes: dict[str, np.ndarray]) -> str:
    """The mean at the end of a run that did not reach 15."""
    return f"{episodes['score'][-SHORT:].mean():.1f} at {episodes['env_steps'][-1]:,.0f}"


def cell(decisions: Sequence[float], without: Sequence[str]) -> str:
    """The decisions of each run, or their median and range; `without`: what stands for a run that has none."""
    if len(decisions) <= LISTED:
        figures = zip(decisions, without, strict=True)
        return "; ".join(f"{count:,.0f}" if np.isfinite(count) else text for count, text in figures)
    low, middle, high = (f"{x:,.0f}" for x in (min(decisions), median(np.array(decisions)), max(decisions)))
    return f"{middle} ({low} to {high})".replace("inf", "-")

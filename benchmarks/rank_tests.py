"""How probable differences between settings are by chance, from results/rank-tests.csv.

A row has a target score and two groups of runs. Tested are the ranks of the decisions that all of them took until
the mean score of a number of episodes was there; runs that missed it share the last rank.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from comparisons import table
from trials import find_runs, passage, read_rows

from a2c.metrics.results import median

DRAWS = 20_000  # random divisions of the runs into two groups


def rank_tests(path: Path) -> str:
    """A row per test: the medians of both groups, and p."""
    rows = []
    for what, target, episodes, *groups in read_rows(path):
        first, second = (decisions_of(path.parent, group, float(target), int(episodes)) for group in groups)
        medians = [f"{len(group)}: {median(group):,.0f}" for group in (first, second)]
        rows.append((what, f"mean of {episodes} at {target}", *medians, f"{p_value(first, second):.1g}"))
    return table(("first and second group", "decisions until", "runs: median", "runs: median", "p"), rows)


def decisions_of(results: Path, group: str, target: float, episodes: int) -> np.ndarray:
    """Decisions of each run: in directories that match patterns, or in a table, `FILE:NAME`; infinite if missed."""
    file, _, name = group.partition(":")
    if not name:
        return np.array([passage(one, target, episodes) for one in find_runs(results, group)])
    with open(results / file, newline="", encoding="utf-8") as lines:
        runs = [run for run in csv.DictReader(lines) if run["name"] == name]
    return np.array([float(run["decisions"]) if run["solved"] == "1" else np.inf for run in runs])


def p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Share of random divisions whose sums of ranks differ by as much, in either direction (permutation test).

    Equal values share the mean of their ranks. The division that was found is counted, too, so p is never 0.
    """
    ranks = mid_ranks(np.concatenate([first, second]))
    size, rng = len(first), np.random.default_rng(0)
    found = abs(ranks[:size].sum() - size * ranks.mean())
    drawn = rng.permuted(np.tile(ranks, (DRAWS, 1)), axis=1)[:, :size].sum(axis=1)
    as_large = np.abs(drawn - size * ranks.mean()) >= found - 1e-9
    return float((1 + as_large.sum()) / (1 + DRAWS))


def mid_ranks(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The rank of each value, from 1; equal ones share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: np.ndarray = (last - (counts - 1) / 2)[place]
    return mean

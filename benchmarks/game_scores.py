"""Tables of the games of the preset `atari`: the last policies, frozen, beside RL Baselines3 Zoo."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from comparisons import RESULTS, about, measured, read_rows, table
from trials import find_runs, mean_at

from a2c.envs.single import ATARI_SUFFIX
from a2c.metrics.results import interval_of_moments

GAMES = sorted(path.parent.name for path in RESULTS.glob("atari/*/about.json"))  # all games of the preset of that name
SHORT = ["boxing", "freeway"]  # trained for 2 million decisions
LONG = [name for name in GAMES if name not in SHORT]  # for 10 million
SEEDS = "atari", "second-seeds"  # directories of the runs with the preset's settings
TITLE = (
    "Unclipped scores of frozen policies after {} decisions: 100 episodes, actions sampled, none sticky, up to\n"
    "30 no-ops (actions that do nothing) at the start. A run per row; 95 % intervals of the means over episodes.\n"
    "Human: the share of the way from a random player to a human.\n"
    "[Zoo](results/README.md#zoo): RL Baselines3 Zoo, one run of 10 million.\n\n"
)


def runs_with_preset(games: Sequence[str]) -> list[str]:
    """Where the runs of `games` with the settings of the preset are, below results/: of some games two seeds."""
    return [f"{directory}/{name}" for name in games for directory in SEEDS]


def mean_scores(*groups: Path) -> str:
    """A line per game: the mean score of each seed, and those of the Zoo where there are any."""
    means = dict[str, list[str]]()
    for figures in map(evaluation, groups):
        means.setdefault(game(figures), []).append(f"{figures['mean']:,.1f}")
    lines = []
    for name, of_seeds in means.items():
        published = [f"{algorithm} {mean:,.1f}" for algorithm, (mean, _) in zoo(name).items()]
        lines.append(f"* {name}: {' and '.join(of_seeds)}" + (f" ({', '.join(published)})" if published else ""))
    return "".join(f"{line}\n" for line in lines)


def evaluation(group: Path) -> dict[str, Any]:
    """The figures of a game's frozen policy."""
    figures: dict[str, Any] = json.loads((group / "evaluation.json").read_text(encoding="utf-8"))
    return figures


def game(figures: dict[str, Any]) -> str:
    """The name of the game that was evaluated."""
    name: str = figures["env"].removesuffix(ATARI_SUFFIX)
    return name


def scores(*groups: Path) -> str:
    """A row per run of a game, a table per commit and processor. Empty without a game."""
    header = ("game", "seed", "mean (interval)", "human", "Zoo A2C", "Zoo PPO")
    rows, decisions = dict[str, list[Sequence[str]]](), set[int]()
    for group in groups:
        figures = evaluation(group)
        decisions.add(figures["env_steps"])
        rows.setdefault(measured([about(group)]), []).append(_row(group, figures))
    parts = [line + table(header, part) for line, part in rows.items()]
    if len(decisions) > 1:
        raise ValueError(f"the games of a table must have as many decisions, got {sorted(decisions)}")
    steps = "".join(f"{count:,}" for count in decisions)
    return TITLE.format(steps) + "\n".join(parts) if groups else ""


def entropy_bonuses(*groups: Path) -> str:
    """A row per game: a run with a constant entropy bonus, and those of the preset, where it falls after 40 % of a run.

    Training means at 40 %, up to which the settings are equal, then the frozen last policies.
    """
    header = (
        "game",
        "decisions",
        "after 40 %: constant; falling",
        "constant (interval)",
        "falling (interval)",
        "change",
    )
    rows = []
    for group in groups:
        paths = [group, *(path for path in (RESULTS / name / group.name for name in SEEDS) if path.exists())]
        constant, *falling = (evaluation(path) for path in paths)
        decisions = constant["env_steps"]
        equal = "; ".join(mean_at(one, int(0.4 * decisions)) for path in paths for one in find_runs(path, "*/*"))
        first, *others = (_mean(figures["mean"], figures["interval"]) for figures in (constant, *falling))
        change = fmean(figures["mean"] for figures in falling) / constant["mean"] - 1
        rows.append((game(constant), f"{decisions:,}", equal, first, "; ".join(others), f"{change:+.1%}"))
    return table(header, rows)


def _row(group: Path, figures: dict[str, Any]) -> Sequence[str]:
    name, published = game(figures), zoo(game(figures))
    (run,) = read_rows(group / "compare.csv")
    cells = [str(run["seed"]), _mean(figures["mean"], figures["interval"]), f"{figures['human_normalized']:.0%}"]
    cells += [_mean(*published[algorithm]) if algorithm in published else "-" for algorithm in ("A2C", "PPO")]
    return f"[{name}](results/{group.parent.name}/{group.name})", *cells


def _mean(mean: float, interval: Sequence[float]) -> str:
    """A mean with its interval, where that is known."""
    return f"{mean:,.1f}" + (" ({:,.1f} to {:,.1f})".format(*interval) if math.isfinite(interval[0]) else "")


def zoo(game: str) -> dict[str, tuple[float, Sequence[float]]]:
    """Mean score of RL Baselines3 Zoo after 10 million decisions of `game`, and its interval, by algorithm."""
    published = {}
    with open(RESULTS / "zoo-scores.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["game"] == game:
                mean, std, episodes = (float(row[name] or "nan") for name in ("mean", "std", "episodes"))
                published[row["algorithm"]] = mean, interval_of_moments(mean, std, episodes)
    return published

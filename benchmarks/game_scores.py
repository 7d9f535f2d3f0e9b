"""Tables of the games of the preset `atari`: the published policies, frozen, beside RL Baselines3 Zoo."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from comparisons import RESULTS, about, measured, table

from a2c.envs.single import ATARI_SUFFIX

LONG = ("breakout", "enduro", "qbert")  # trained for 10 million decisions
GAMES = {path.parents[1].name for path in RESULTS.glob("*/atari/seed-*")}  # all games of the preset of that name
TITLE = (
    "Unclipped scores of frozen policies after {} decisions: 100 episodes, actions sampled, none sticky, up to\n"
    "30 no-ops. One seed each; intervals are over episodes. Human: human-normalised score.\n"
    "[Zoo](results/README.md#zoo): RL Baselines3 Zoo, one run of 10 million{}.\n\n"
)
ZOO: dict[str, tuple[float, float]] = {  # A2C and PPO of RL Baselines3 Zoo at 10 million decisions: its benchmark.md
    "BeamRider": (2_890, 3_397),
    "Breakout": (280, 398),
    "Enduro": (0, 996),
    "MsPacman": (1_672, 1_754),
    "Pong": (17.3, 21.0),
    "Qbert": (3_882, 15_627),
    "Seaquest": (1_721, 1_784),
    "SpaceInvaders": (627, 960),
}


def after_10_million(*groups: Path) -> str:
    """Games that were trained for 10 million decisions."""
    return _tables(groups, None)


def after_2_million(*groups: Path) -> str:
    """Games that were trained for 2 million decisions, also beside the Zoo's scores after as many."""
    return _tables(groups, zoo_at_2_million())


def mean_scores(*groups: Path) -> str:
    """A line per game: its mean score, and those of the Zoo where there are any."""
    text = ""
    for figures in map(evaluation, groups):
        zoo = " (A2C {:,}, PPO {:,})".format(*ZOO[game(figures)]) if game(figures) in ZOO else ""
        text += f"* {game(figures)}: {figures['mean']:,.1f}{zoo}\n"
    return text


def evaluation(group: Path) -> dict[str, Any]:
    """The figures of a game's frozen policy."""
    figures: dict[str, Any] = json.loads((group / "evaluation.json").read_text(encoding="utf-8"))
    return figures


def game(figures: dict[str, Any]) -> str:
    """The name of the game that was evaluated."""
    name: str = figures["env"].removesuffix(ATARI_SUFFIX)
    return name


def _tables(groups: Sequence[Path], early: dict[str, float] | None) -> str:
    """A row per game, a table per commit and processor. Empty without a game. `early`: the Zoo's, by game, if any."""
    header = ("game", "mean (95 % interval)", "human", *(["Zoo A2C at 2 M"] if early is not None else []))
    rows, decisions = dict[str, list[Sequence[str]]](), set[int]()
    for group in groups:
        figures = evaluation(group)
        decisions.add(figures["env_steps"])
        rows.setdefault(measured([about(group)]), []).append(_row(group.name, figures, early))
    parts = [line + table((*header, "Zoo A2C", "Zoo PPO"), part) for line, part in rows.items()]
    if len(decisions) > 1:
        raise ValueError(f"the games of a table must have as many decisions, got {sorted(decisions)}")
    steps = "".join(f"{count:,}" for count in decisions)
    title = TITLE.format(steps, "; at 2 M: its training episodes' mean" if early is not None else "")
    return title + "\n".join(parts) if groups else ""


def _row(group: str, figures: dict[str, Any], early: dict[str, float] | None) -> Sequence[str]:
    name = game(figures)
    mean, low, high = (f"{value:,.1f}" for value in (figures["mean"], *figures["interval"]))
    others = [f"{figures['human_normalized']:.0%}"]
    if early is not None:
        others.append(f"{early[name]:,.1f}" if name in early else "-")
    others += [f"{score:,}" for score in ZOO.get(name, ())] or ["-", "-"]
    return f"[{name}](results/{group})", f"{mean} ({low} to {high})", *others


def zoo_at_2_million() -> dict[str, float]:
    """Mean scores of A2C's training episodes in RL Baselines3 Zoo that ended near 2 million decisions, per game."""
    scores: dict[str, list[float]] = {}
    with open(RESULTS / "zoo.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            scores.setdefault(row["game"], []).append(float(row["score"]))
    return {game: float(np.mean(values)) for game, values in scores.items()}

"""The options of the commands beside `train`, whose options are the fields of `Config`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from a2c.config.config import Algorithm


@dataclass(frozen=True)
class Evaluate:
    """Play a trained, frozen policy and print the true score of its games."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory (path)."""
    episodes: int = 30
    """Games to play (count)."""
    checkpoint: str = "latest.pt"
    """Checkpoint inside the run directory: latest.pt or best.pt (file name)."""
    greedy: bool = False
    """Take the most likely action instead of sampling from the policy."""
    seed: int = 10_000
    """Seed of environments and sampling (integer, 0 or more)."""
    cuda: bool = False
    """Use the GPU."""


@dataclass(frozen=True)
class RecordVideo:
    """Film one game of a trained, frozen policy: a picture per decision, at the speed at which people play."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory (path)."""
    out: Path | None = None
    """File to write, .mp4 or .gif (path; None = game.mp4 in the run directory)."""
    checkpoint: str = "latest.pt"
    """Checkpoint inside the run directory: latest.pt or best.pt (file name)."""
    greedy: bool = False
    """Take the most likely action instead of sampling from the policy."""
    seed: int = 10_000
    """Seed of environment and sampling (integer, 0 or more)."""


@dataclass(frozen=True)
class Compare:
    """Train several algorithms on the same game with the same flags, budget and seeds, and draw them side by side.

    All other flags are those of `a2c train`. The same command goes on with a comparison that was stopped.
    """

    out: Annotated[Path, tyro.conf.Positional]
    """Directory of the comparison: a run directory per algorithm and seed, compare.csv, compare.png (path)."""
    algorithms: tuple[Algorithm, ...] = ("a2c", "a3c", "ga3c")
    """What to compare (names)."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the runs (integers, 0 or more)."""

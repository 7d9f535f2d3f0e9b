"""The options of the commands. Those of `train` are the fields of `Config`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from a2c.config.config import Config


@dataclass(frozen=True)
class Evaluate:
    """Run a trained policy, without learning, and print its true scores."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a checkpoint or policy file (path)."""
    episodes: int = 30
    """Number of episodes (count)."""
    checkpoint: str | None = None
    """Checkpoint: best.pt, latest.pt, policies/... of the run, or a file elsewhere (path; None = best.pt if there)."""
    greedy: bool = False
    """Take the most likely action instead of sampling from the policy."""
    seed: int = 10_000
    """Seed of environments and sampling (integer, 0 or more)."""
    cuda: bool = False
    """Use the GPU."""
    json: bool = False
    """Print protocol, results and every score as JSON."""


@dataclass(frozen=True)
class RecordVideo:
    """Record a video of a trained policy, one picture per decision, in real time."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a checkpoint or policy file (path)."""
    out: Path | None = None
    """File to write, .webp, .gif or, with the extra a2c[video], .mp4 (path; None = episode.webp in that directory)."""
    checkpoint: str | None = None
    """Checkpoint: best.pt, latest.pt, policies/... of the run, or a file elsewhere (path; None = best.pt if there)."""
    greedy: bool = False
    """Take the most likely action instead of sampling from the policy."""
    seed: int = 10_000
    """Seed of environment and sampling, that of the first episode (integer, 0 or more)."""
    episodes: int = 1
    """Number of episodes in the film; each has the seed after the one before (count)."""
    best_of: int = 1
    """Play this many episodes and record the one with the highest score (count)."""
    overlay: bool = False
    """Show the value estimate and the action probabilities beside the picture."""


@dataclass(frozen=True)
class Export:
    """Write the policy of a run to one small file, which can be evaluated and recorded but not resumed."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a checkpoint (path)."""
    out: Annotated[Path, tyro.conf.Positional]
    """New file to write, .pt (path)."""
    checkpoint: str | None = None
    """Checkpoint: best.pt, latest.pt, policies/... of the run, or a file elsewhere (path; None = best.pt if there)."""
    half: bool = False
    """Store parameters as float16, in half the space; they are loaded as float32."""


@dataclass(frozen=True)
class Compare:
    """Train every combination of settings over several seeds, and compare them in tables and one picture.

    All other options are those of `a2c train`. The same command continues a comparison that was stopped.
    """

    out: Annotated[Path, tyro.conf.Positional]
    """Directory of the comparison: a run directory per setting and seed, two tables, compare.png (path)."""
    vary: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Option of `a2c train` and its values, such as rollout_steps=20,64; every combination is trained (FIELD=V1,V2)."""
    seeds: tuple[str, ...] = ("0",)
    """Seeds, one run each per setting, such as 0..4 or 0,3,7 (integers, 0 or more)."""
    jobs: int = 1
    """Runs that are trained at the same time; they share the cores where --threads is not given (count)."""


Options = Config | Evaluate | RecordVideo | Export | Compare
COMMANDS: dict[str, type[Options]] = {
    "train": Config,
    "evaluate": Evaluate,
    "record": RecordVideo,
    "export": Export,
    "compare": Compare,
}

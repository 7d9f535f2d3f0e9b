"""The options of the commands. Those of `train` are the fields of `Config`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from a2c.config.config import Config


@dataclass(frozen=True)
class Evaluate:
    """Run a trained policy, without learning, and print the unclipped scores."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a checkpoint or policy file (path)."""
    episodes: int = 30
    """Number of episodes (count)."""
    checkpoint: str | None = None
    """Checkpoint: best.pt, latest.pt, policies/... of the run, or ./another file (path; None = best.pt if there)."""
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
    """Record a video of a trained policy, one picture per decision, played back at the game's speed."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a checkpoint or policy file (path)."""
    out: Path | None = None
    """File to write, .webp, .gif or, with the extra a2c[video], .mp4 (path; None = episode.webp in that directory)."""
    checkpoint: str | None = None
    """Checkpoint: best.pt, latest.pt, policies/... of the run, or ./another file (path; None = best.pt if there)."""
    greedy: bool = False
    """Take the most likely action instead of sampling from the policy."""
    seed: int = 10_000
    """Seed of environment and sampling, that of the first episode (integer, 0 or more)."""
    episodes: int = 1
    """Number of episodes in the video; each has the seed after the one before (count)."""
    best_of: int = 1
    """Play this many episodes, each up to max_length, and record the one with the highest score (count)."""
    max_length: int = 30_000
    """End an episode that has not ended after this many decisions (decisions; Atari has 15 a second)."""
    overlay: bool = False
    """Show the value estimate and the action probabilities beside the picture."""
    tensorboard: bool = False
    """Also add the video to the run's TensorBoard images (out must be a .gif)."""


@dataclass(frozen=True)
class Export:
    """Write the policy of a run to one small file: .pt to evaluate and record, .onnx for runtimes other than torch."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a checkpoint (path)."""
    out: Annotated[Path, tyro.conf.Positional]
    """New file to write, .pt or .onnx (path)."""
    checkpoint: str | None = None
    """Checkpoint: best.pt, latest.pt, policies/... of the run, or ./another file (path; None = best.pt if there)."""
    half: bool = False
    """Store parameters of a .pt file as float16, in half the space; they are loaded as float32."""


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


@dataclass(frozen=True)
class Sweep(Compare):
    """Search settings: train every combination for a while, the better half for longer, and so on, within a budget.

    All other options are those of `a2c train`. The same command continues a search that was stopped.
    """

    budget: Annotated[str | None, tyro.conf.arg(metavar="DECISIONS|TIME")] = None
    """Decisions of all runs together, such as 5e6, or wall time, such as 2h (None = up to --total-env-steps)."""


@dataclass(frozen=True)
class Plot:
    """Draw learning curves of one run or many; runs that differ only in the seed share a line and a band."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH ...", help_behavior_hint="")]
    """Run directories, or directories that hold some, such as that of `a2c compare` (paths)."""
    out: Path = Path("plot.png")
    """File to write, .png or .svg (path)."""
    x: Literal["decisions", "frames", "seconds"] = "decisions"
    """Horizontal axis: decisions of the agent, frames of the emulator, or wall time."""
    metric: str = "reward_100"
    """What is drawn, a column of metrics.csv (name)."""
    iqm: bool = False
    """Draw the mean of the middle half of the runs in place of their median."""
    interval: bool = False
    """Draw the band as the line's 95 % bootstrap interval, not as the range of the runs."""


@dataclass(frozen=True)
class Report:
    """Write a report of a run: one HTML file with results, interactive curves, settings and a model card."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Run directory, finished or not (path)."""
    out: Path = Path("report.html")
    """File to write, .html (path)."""


@dataclass(frozen=True)
class Watch:
    """Show a run while it goes on: the page of `a2c report` in a browser on this machine, refreshed in place."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Run directory (path)."""
    port: int = 0
    """Port of the page at 127.0.0.1 (1024 to 65535; 0 = any that is free)."""
    open: bool = True
    """Open the page in a browser."""


Options = Config | Evaluate | RecordVideo | Export | Compare | Sweep | Plot | Report | Watch
COMMANDS: dict[str, type[Options]] = {
    "train": Config,
    "evaluate": Evaluate,
    "record": RecordVideo,
    "export": Export,
    "compare": Compare,
    "sweep": Sweep,
    "plot": Plot,
    "report": Report,
    "watch": Watch,
}

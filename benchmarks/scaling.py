"""How training scales with the ranks that torchrun starts: decisions per second, and the time of an all-reduce.

    python benchmarks/scaling.py --preset pong-fast            # 1 rank of 1 thread, 1 of 2, 2 of 1, 4 of 1
    python benchmarks/scaling.py --preset pong-fast --layouts 1x16 4x4 16x1 --json scaling.json

The total of environments, and with it the algorithm, stays the same; only the number of processes that share the work
changes. Windows alternate, a run of each per round, so that a slow minute of the machine affects all of them; start and
first rollouts are left out. More ranks than cores cannot be faster: they show what sharing costs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import make_console, run_benchmark
from rich.console import Console
from rich.table import Table

from a2c.cli.flags import parse_config
from a2c.compute.torch_ranks import join_ranks
from a2c.config.config import Config
from a2c.metrics.files import read_table
from a2c.run.about import machine_facts
from a2c.run.trainer import Trainer
from a2c.update import clipped_step

HELP = "Speed of training on several ranks. Every flag of train.py works too: --preset, --num-envs ..."
WARM_UP = 0.25  # share of a run that is left out
REPEATS = 50  # all-reduces whose median counts
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Options:
    """Flags of the measurement; all others are those of train.py."""

    decisions: int = 40_000
    """Length of each run (env_steps)."""
    rounds: int = 3
    """Runs of each layout (count)."""
    layouts: tuple[str, ...] = ("1x1", "1x2", "2x1", "4x1")
    """Ranks, and compute threads of each (ranks x threads)."""
    json: Path | None = None
    """Write every figure to this file (path)."""


def torchrun(ranks: int, *command: str) -> str:
    """Run a script of Python on `ranks` ranks of this machine; what rank 0 printed. RuntimeError where it fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environ = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks failed: {done.stderr[-2000:]}")
    return done.stdout


def train(ranks: int, threads: int, options: Options, flags: list[str]) -> float:
    """Decisions per second of one run, without its first quarter."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = str(Path(folder) / "run")
        length = ["--stop-after", str(options.decisions), "--log-every", "0.1"]
        torchrun(ranks, str(ROOT / "train.py"), *flags, *length, "--threads", str(threads), "--run-dir", run_dir)
        rows = read_table(Path(run_dir) / "metrics.csv", ("env_steps", "seconds"))
    steps, seconds = rows["env_steps"], rows["seconds"]
    first = int((steps < WARM_UP * options.decisions).sum())
    return float((steps[-1] - steps[first]) / (seconds[-1] - seconds[first]))


def all_reduce(ranks: int, numbers: int) -> float:
    """Median milliseconds of an all-reduce of so many float32 numbers, by gloo."""
    return float(torchrun(ranks, __file__, "--all-reduce", str(numbers)))


def time_all_reduce(numbers: int) -> None:
    """What each rank does for `all_reduce`; the first prints the result."""
    with closing(join_ranks(Config(num_envs=1024))) as ranks:
        tensor, times = torch.zeros(numbers), []
        for _ in range(REPEATS):
            ranks.all_gather(None)  # all begin at once
            began = time.perf_counter()
            ranks.all_reduce(tensor)
            times.append(time.perf_counter() - began)
        if ranks.rank == 0:
            print(1000 * statistics.median(times))


def optimizer_step(config: Config) -> tuple[float, int]:
    """Median milliseconds of what every rank does in full for each minibatch, and the numbers in its gradient."""
    with closing(Trainer(config)) as trainer:
        learner, times = trainer.learner, []
        parameters = list(learner.net.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(REPEATS):
            began = time.perf_counter()
            clipped_step(learner.net, learner.optimizer, config.max_grad_norm)
            learner.sync()
            times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times), sum(parameter.numel() for parameter in parameters)


def parse_layout(text: str) -> tuple[int, int]:
    """Ranks and threads of `4x2`; ValueError for anything else."""
    ranks, _, threads = text.partition("x")
    if not (ranks.isdecimal() and threads.isdecimal() and int(ranks) and int(threads)):
        raise ValueError(f"layouts must be ranks and threads, like 4x2, got {text}")
    return int(ranks), int(threads)


def run(options: Options, flags: list[str]) -> dict[str, Any]:
    """Every figure: speeds per layout in alternating runs, and all-reduces of this network's gradient."""
    if not (layouts := [parse_layout(text) for text in options.layouts]):
        raise ValueError("layouts must name at least one, like 4x2")
    config = parse_config(flags)
    with tempfile.TemporaryDirectory() as folder:
        step, numbers = optimizer_step(parse_config([*flags, "--run-dir", f"{folder}/run"]))
    speeds: dict[tuple[int, int], list[float]] = {layout: [] for layout in layouts}
    for _ in range(options.rounds):
        for layout, found in speeds.items():
            found.append(train(*layout, options, flags))
    first = statistics.median(speeds[layouts[0]])
    rows = [
        {"ranks": ranks, "threads": threads, "speeds": found, "speedup": statistics.median(found) / first}
        for (ranks, threads), found in speeds.items()
    ]
    times = {str(ranks): all_reduce(ranks, numbers) for ranks in sorted({ranks for ranks, _ in layouts} - {1})}
    return {
        "machine": machine_facts(),
        "config": json.loads(config.to_json()),
        "decisions": options.decisions,
        "layouts": rows,
        "optimizer_milliseconds": step,
        "all_reduce": {"numbers": numbers, "milliseconds": times},
    }


def report(figures: dict[str, Any], console: Console) -> None:
    """Print the figures as a table."""
    table = Table("ranks", "threads of each", "decisions/s: median (min to max)", "speed-up over the first")
    for row in figures["layouts"]:
        speeds = row["speeds"]
        middle = f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
        table.add_row(str(row["ranks"]), str(row["threads"]), middle, f"{row['speedup']:.2f}")
    console.print(table)
    reduce = figures["all_reduce"]
    console.print(f"optimiser step: {figures['optimizer_milliseconds']:.2f} ms")
    for ranks, milliseconds in reduce["milliseconds"].items():
        console.print(f"all-reduce of {reduce['numbers']:,} numbers on {ranks} ranks: {milliseconds:.2f} ms")
    console.print(f"{figures['machine']['processor']} ({figures['machine']['instructions']})")


def main() -> int:
    """The whole benchmark, or what each rank of it does; returns the exit code."""
    if sys.argv[1:2] == ["--all-reduce"]:
        time_all_reduce(int(sys.argv[2]))
        return 0
    return run_benchmark(
        Options, HELP, run, lambda figures: report(figures, make_console()), errors=(ValueError, RuntimeError)
    )


if __name__ == "__main__":
    raise SystemExit(main())

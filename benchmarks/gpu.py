"""How fast training is on a GPU, and how much of the environments' own speed it keeps.

    python benchmarks/gpu.py --preset pong-fast --num-envs 256 --json gpu.json
    python benchmarks/gpu.py --preset pong-fast --num-envs 256 --no-cuda-graphs
    python benchmarks/gpu.py --preset pong-fast --target       # and the wall time to a mean score of 18 on Pong

Speeds are decisions per second (env_steps/s). Two stages alternate, one window each per round; the median counts.

* environments: random actions, in the groups and threads that training uses, without a network: the bound
* end to end: training without log, checkpoint and display

Every flag of train.py works too. Without a GPU it measures the CPU, and says so.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import check_windows, make_console, run_benchmark, window
from throughput import measure, step_envs

from a2c.cli.flags import parse_config
from a2c.config.config import Config
from a2c.run.about import machine_facts
from a2c.run.trainer import Trainer

HELP = "Speed of training on a GPU and its share of the environments' own. Every flag of train.py works too."


@dataclass(frozen=True)
class Options:
    """Flags of the measurement; all others are those of train.py."""

    seconds: float = 10.0
    """Length of one window (seconds)."""
    rounds: int = 5
    """Windows of each stage (count)."""
    target: bool = False
    """Train a whole run afterwards, until its target score (18 on Pong) or its last decision."""
    json: Path | None = None
    """Write every figure to this file (path)."""


def speeds(options: Options, config: Config) -> dict[str, Any]:
    """Decisions/s of both stages, the share, and what was measured."""
    with ExitStack() as stack:
        training = Trainer(config)
        stack.callback(training.close)
        training.start()
        stages = {
            "environments": partial(step_envs, training.algorithm.groups, training.compute, np.random.default_rng(0)),
            "end to end": lambda: training.algorithm.training_step().env_steps,
        }
        window(stages["end to end"], min(options.seconds, 3.0))  # captures, and chooses kernels
        windows = measure(stages, options.seconds, options.rounds)
        device, precision = str(training.compute.device), training.compute.precision_name
        graphs = training.compute.cuda_graphs
    median = {name: statistics.median(values) for name, values in windows.items()}
    share = median["end to end"] / median["environments"]
    peak = torch.cuda.max_memory_allocated() / 1e6 if device != "cpu" else None
    facts = {"device": device, "precision": precision, "cuda_graphs": graphs, "peak_gpu_mb": peak}
    return {**facts, "windows": windows, "median": median, "share_of_environments": share}


def time_to_target(config: Config) -> dict[str, Any]:
    """Wall time and decisions of a whole run; `reached`: it met its target score."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(replace(config, run_dir=Path(folder) / "run", progress=False))
        result = trainer.run()
        target = trainer.config.target_score
    reached = target is not None and result.best_score >= target
    return {"target": target, "reached": reached, "seconds": result.seconds, "env_steps": result.env_steps}


def run(options: Options, config: Config) -> dict[str, Any]:
    """All figures of one measurement."""
    machine = machine_facts()
    figures = {"machine": machine, "config": json.loads(config.to_json()), **speeds(options, config)}
    return figures | {"to_target": time_to_target(config) if options.target else None}


def report(figures: dict[str, Any]) -> list[str]:
    """The figures as lines of text."""
    config, median, share = figures["config"], figures["median"], figures["share_of_environments"]
    graphs = ", CUDA graphs" if figures["cuda_graphs"] else ""
    name = figures["machine"]["gpu"] if figures["device"] != "cpu" else "no GPU: these are figures of the CPU"
    lines = [
        f"{config['env']}, preset {config['preset']}, {config['backend']} x {config['num_envs']}",
        f"{figures['device']} ({name}), {figures['precision']}{graphs}, {figures['machine']['cores']} cores",
        f"end to end     {median['end to end']:,.0f} decisions/s",
        f"environments   {median['environments']:,.0f} decisions/s; training keeps {share:.0%} of that",
    ]
    if target := figures["to_target"]:
        what = f"a mean score of {target['target']:g}" if target["reached"] else "the end, without the target score"
        lines.append(f"to {what}: {target['seconds']:,.0f} s, {target['env_steps']:,} decisions")
    return lines


def measure_flags(options: Options, flags: list[str]) -> dict[str, Any]:
    """Check the flags and measure."""
    check_windows(options.seconds, options.rounds)
    config = parse_config(["--cuda", *flags])
    if config.algorithm != "a2c":
        raise ValueError(f"algorithm must be a2c, whose environments can be stepped alone, got {config.algorithm}")
    return run(options, config)


def main() -> int:
    """The whole benchmark; returns the exit code."""

    def show(figures: dict[str, Any]) -> None:
        make_console().print(*report(figures), sep="\n", soft_wrap=True)

    return run_benchmark(Options, HELP, measure_flags, show)


if __name__ == "__main__":
    raise SystemExit(main())

"""How fast each stage of training runs alone, how fast they run together, and what the cores allow.

    python benchmarks/throughput.py --preset default --backend native

Speeds are decisions per second (env_steps/s). The stages alternate, one window each per round, so
that a slow minute of the machine affects all of them; the median window counts.

* environments: random actions, in the groups and threads that training uses
* acting: forward pass and sampling on the observations of a recorded rollout
* learning: one optimiser step per minibatch of the recorded rollout, then the normaliser's statistics
* end to end: training without log, checkpoint and display
* 1 thread: the first three on one thread, all environments in one group. For `async` the
  environments are stepped in one loop, so that neither processes nor pipes count.

Core bound: cores / (sum of the 1-thread stages' seconds per decision): the speed of a training that
loses nothing to waiting, copying or uneven shares, and that spreads over all cores even what
runs on one thread, the optimiser's step and the normaliser's statistics.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import PeakMemory, check_windows, make_console, run_benchmark, window
from rich.console import Console
from rich.table import Table

from a2c.cli.flags import parse_config
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.envs.make import make_envs, make_groups, run_seeds
from a2c.envs.vector_env import MonitoredVectorEnv
from a2c.policy import Policy
from a2c.rollout import Rollout
from a2c.run.about import machine_facts
from a2c.run.trainer import Trainer

HELP = "Speed of training, stage by stage and as a whole. Every flag of train.py works too: --preset, --backend ..."
STEPS = 20  # decisions per environment in one call of a stage that runs alone
PARTS = ("environments", "acting", "learning")
SINGLE = ", 1 thread"  # suffix of the stages from which the core bound is computed


@dataclass(frozen=True)
class Options:
    """Flags of the measurement; all others are those of train.py."""

    seconds: float = 10.0
    """Length of one window (seconds)."""
    rounds: int = 5
    """Windows of each stage (count)."""
    json: Path | None = None
    """Write every figure to this file (path)."""


def close(groups: Sequence[MonitoredVectorEnv], compute: Compute) -> None:
    """Close environments and threads."""
    for envs in groups:
        envs.close()
    compute.close()


def time_to_first_step(config: Config) -> float:
    """Seconds to start the environments, reset them and step each once. Call it before anything else has run."""
    began = time.perf_counter()
    compute = Compute(config)
    groups = make_groups(config, run_seeds(config).envs, compute.env_groups, compute.threads_per_group)
    try:
        compute.map(lambda envs: envs.reset(), groups)
        compute.map(lambda envs: envs.step(np.zeros(envs.num_envs, np.int64)), groups)
        return time.perf_counter() - began
    finally:
        close(groups, compute)


def step_envs(groups: Sequence[MonitoredVectorEnv], compute: Compute, rng: np.random.Generator) -> int:
    """Step every environment `STEPS` times with random actions, each group in its compute thread."""

    def play(envs: MonitoredVectorEnv, actions: np.ndarray) -> None:
        for row in actions:
            envs.step(row)

    actions = [rng.integers(envs.single_action_space.n, size=(STEPS, envs.num_envs)) for envs in groups]
    compute.map(play, groups, actions)
    return sum(a.size for a in actions)


def act(trainer: Trainer, columns: Sequence[slice], rollouts: Sequence[Rollout]) -> int:
    """Act on every recorded observation as `Collector` does, each group's columns in a compute thread."""

    @torch.no_grad()
    def play(mine: slice) -> None:
        policy = Policy(trainer.learner.replica, rollouts[0].actions[:, mine].shape[1], trainer.compute.device)
        for rollout in rollouts:
            for obs, starts in zip(rollout.obs[:, mine], rollout.starts[:, mine], strict=True):
                policy.decide(obs, starts).actions.cpu()
            trainer.learner.replica(rollout.next_obs[mine])

    trainer.compute.map(play, columns)
    return sum(len(rollout) for rollout in rollouts)


def replay(trainer: Trainer, rollouts: Sequence[Rollout]) -> int:
    """Learn from the recorded rollouts again."""
    for rollout in rollouts:
        trainer.learner.learn(rollout)
    return sum(len(rollout) for rollout in rollouts)


def make_stages(training: Trainer, stack: ExitStack) -> dict[str, Callable[[], int]]:
    """The stages that alternate: functions that do their work once and return the number of decisions."""
    rng, collector = np.random.default_rng(0), training.algorithm.collector
    # A vanishing step size costs the same, and the acting policy does not change.
    config = replace(training.config, learning_rate=1e-12)
    recorded = [copy.deepcopy(collector.collect().rollout) for _ in range(-(-STEPS // collector.rollout_steps))]
    learner = Trainer(config)
    stack.callback(learner.close)
    stages: dict[str, Callable[[], int]] = {
        "environments": partial(step_envs, training.algorithm.groups, training.compute, rng),
        "acting": partial(act, learner, collector.slices, recorded),
        "learning": partial(replay, learner, recorded),
        "end to end": lambda: training.algorithm.training_step().env_steps,
    }
    if training.compute.device.type == "cuda":
        return stages
    alone = replace(config, threads=1)
    single = Trainer(alone)
    few = alone if config.backend == "native" else replace(alone, backend="sync", num_envs=min(4, config.num_envs))
    envs = make_envs(few)
    stack.callback(close, [envs], single.compute)
    envs.reset()
    parts = (
        partial(step_envs, [envs], single.compute, rng),
        partial(act, single, [slice(None)], recorded),
        partial(replay, single, recorded),
    )
    return stages | {part + SINGLE: stage for part, stage in zip(PARTS, parts, strict=True)}


def measure(stages: dict[str, Callable[[], int]], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Decisions/s of every window: one short round to warm up, then `rounds` rounds over all stages."""
    speeds: dict[str, list[float]] = {name: [] for name in stages}
    for turn in range(rounds + 1):
        print(f"round {turn} of {rounds}" if turn else "warming up", file=sys.stderr, flush=True)
        for name, stage in stages.items():
            steps, elapsed = window(stage, seconds if turn else min(seconds, 1.0))
            if turn:
                speeds[name].append(steps / elapsed)
    return speeds


def report(figures: dict[str, Any], console: Console) -> None:
    """Print facts, table and bounds."""
    console.print(", ".join(f"{name} {value}" for name, value in figures["machine"].items()), soft_wrap=True)
    console.print(figures["title"], soft_wrap=True)
    table = Table()
    for column in ("stage", "decisions/s", "min .. max", "µs per decision", "end to end / stage"):
        table.add_column(column, justify="left" if column == "stage" else "right", no_wrap=True)
    whole = figures["median"]["end to end"]
    for name, speeds in figures["windows"].items():
        median = figures["median"][name]
        spread = f"{min(speeds):,.0f} .. {max(speeds):,.0f}"
        table.add_row(name, f"{median:,.0f}", spread, f"{1e6 / median:.1f}", f"{whole / median:.2f}")
    console.print(table)
    if figures["core_bound"]:
        console.print(
            f"core bound of {figures['machine']['cores']} cores: {figures['core_bound']:,.0f} decisions/s; "
            f"end to end reaches {figures['share_of_core_bound']:.0%} of it"
        )
    console.print(
        f"start to first step {figures['startup_seconds']:.2f} s (imports not counted); "
        f"peak memory of start and first seconds {figures['peak_pss_mb']:,.0f} MB PSS, "
        f"{figures['peak_rss_mb']:,.0f} MB as a sum of RSS",
        soft_wrap=True,
    )


def run(options: Options, config: Config) -> dict[str, Any]:
    """All figures of one measurement."""
    machine = machine_facts()  # before a run sets torch's number of threads
    startup = time_to_first_step(config)
    with ExitStack() as stack:
        with PeakMemory(os.getpid()) as memory:
            training = Trainer(config)
            stack.callback(training.close)
            training.start()
            window(lambda: training.algorithm.training_step().env_steps, min(options.seconds, 3.0))
        speeds = measure(make_stages(training, stack), options.seconds, options.rounds)
        precision = training.compute.precision_name
    median = {name: statistics.median(values) for name, values in speeds.items()}
    bound = (
        None
        if training.compute.device.type == "cuda"
        else machine["cores"] / sum(1 / median[part + SINGLE] for part in PARTS)
    )
    title = f"{config.env}, preset {config.preset}, {config.backend} x {config.num_envs}, network {config.network}"
    return {
        "title": f"{title}, {precision}, {options.rounds} windows of {options.seconds:g} s",
        "machine": machine | {"precision": precision},
        "config": json.loads(config.to_json()),
        "windows": speeds,
        "median": median,
        "core_bound": bound,
        "share_of_core_bound": bound and median["end to end"] / bound,
        "startup_seconds": startup,
        "peak_pss_mb": memory.pss,
        "peak_rss_mb": memory.rss,
    }


def measure_flags(options: Options, flags: list[str]) -> dict[str, Any]:
    """Check the flags and measure."""
    check_windows(options.seconds, options.rounds)
    return run(options, parse_config(flags))


def main() -> int:
    """The whole benchmark; returns the exit code."""
    return run_benchmark(Options, HELP, measure_flags, lambda figures: report(figures, make_console()))


if __name__ == "__main__":
    raise SystemExit(main())

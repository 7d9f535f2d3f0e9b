"""Evaluate: play episodes with the frozen policy of a run, and report their true scores."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.compute.replica import make_replica
from a2c.envs.make import make_envs
from a2c.tools.load import load_policy


def evaluate(
    run_dir: str | Path,
    episodes: int = 30,
    *,
    checkpoint: str = "latest.pt",
    greedy: bool = False,
    seed: int = 10_000,
    cuda: bool = False,
    threads: int = 0,
) -> np.ndarray:
    """Scores `[episodes]` (float64, points) of whole episodes played by the run's frozen policy.

    Every environment plays a fixed number of episodes, so that short ones are not favoured.
    Actions are sampled from the policy, as in training, or the most likely ones (`greedy`).
    `threads`: compute threads, 0 for one per core.
    A lost life does not end an episode, rewards are not clipped. Raises what `load_policy` raises, ValueError for
    bad arguments, WorkerError for an environment that fails, FloatingPointError where the policy's outputs are NaN or
    infinite.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed must be at least 0 and below 2^31, got {seed}")
    config, net, _ = load_policy(Path(run_dir), checkpoint, cuda)
    rows = min(episodes, 10)
    config = replace(config, num_envs=rows, seed=seed, threads=threads, terminal_on_life_loss=False)
    with ExitStack() as closing:
        compute = Compute(config)
        closing.callback(compute.close)
        envs = make_envs(config)
        closing.callback(envs.close)
        closing.callback(compute.wait_idle)  # after Ctrl-C its thread may still step them
        collector = Collector([envs], make_replica(net, compute), 1, compute, seed, greedy)
        quota = np.full(rows, episodes // rows) + (np.arange(rows) < episodes % rows)
        scores: list[float] = []
        while len(scores) < episodes:
            for episode in collector.collect().episodes:
                if quota[episode.env] > 0:
                    quota[episode.env] -= 1
                    scores.append(episode.score)
        return np.array(scores)

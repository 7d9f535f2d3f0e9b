"""Evaluate: play episodes with the frozen policy of a run, and report their true scores."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.compute.replica import make_replica
from a2c.config.config import Config
from a2c.envs.atari import sticky_probability
from a2c.envs.make import make_envs
from a2c.envs.single import checked_spec, is_atari
from a2c.envs.vector_env import Episode
from a2c.metrics.results import interval_of_mean
from a2c.tools.load import load_policy


class Evaluation(NamedTuple):
    """Whole episodes that a frozen policy has played."""

    config: Config  # that the episodes were played with
    env_steps: int  # decisions that the policy had learned from
    greedy: bool
    episodes: list[Episode]  # in the order in which they ended

    @property
    def scores(self) -> np.ndarray:
        """Score of each episode `[episodes]` (float64, points)."""
        return np.array([episode.score for episode in self.episodes], dtype=np.float64)

    def summary(self) -> dict[str, Any]:
        """Protocol and results; `interval` is the 95 % interval of the mean, NaN for fewer than five episodes."""
        spec, scores = checked_spec(self.config), self.scores
        names = ("env", "noop_max", "max_episode_frames") if is_atari(spec) else ("env",)
        return {
            **{name: getattr(self.config, name) for name in names},
            **({"sticky_actions": sticky_probability(self.config, spec)} if is_atari(spec) else {}),
            "actions": "greedy" if self.greedy else "sampled",
            "seed": self.config.seed,
            "env_steps": self.env_steps,
            "episodes": len(scores),
            "mean": float(scores.mean()),
            "interval": list(interval_of_mean(scores)),
            "standard_deviation": float(scores.std()),
            "min": float(scores.min()),
            "max": float(scores.max()),
            "scores": scores.tolist(),
            "lengths": [int(episode.length) for episode in self.episodes],
        }


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

    Actions are sampled from the policy, as in training, or the most likely ones (`greedy`). `threads`: compute
    threads, 0 for one per core. A lost life does not end an episode, rewards are not clipped. Raises what `play` does.
    """
    options = {"checkpoint": checkpoint, "greedy": greedy, "seed": seed, "cuda": cuda, "threads": threads}
    return play(run_dir, episodes, **options).scores  # type: ignore[arg-type]


def play(
    run_dir: str | Path,
    episodes: int = 30,
    *,
    checkpoint: str = "latest.pt",
    greedy: bool = False,
    seed: int = 10_000,
    cuda: bool = False,
    threads: int = 0,
) -> Evaluation:
    """Play whole episodes with the run's frozen policy.

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
    config, net, state = load_policy(Path(run_dir), checkpoint, cuda)
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
        played: list[Episode] = []
        while len(played) < episodes:
            for episode in collector.collect().episodes:
                if quota[episode.env] > 0:
                    quota[episode.env] -= 1
                    played.append(episode)
        return Evaluation(config, state["env_steps"], greedy, played)

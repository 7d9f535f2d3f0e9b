"""Evaluate: play episodes with the frozen policy of a run, and report their unclipped scores."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.compute.replica import make_replica
from a2c.config.config import Config
from a2c.config.validation import check_count
from a2c.envs.atari import sticky_probability
from a2c.envs.make import make_envs
from a2c.envs.single import EnvFn, checked_spec, is_atari
from a2c.envs.vector_env import Episode
from a2c.metrics.results import interval_of_mean
from a2c.metrics.text import format_number
from a2c.networks import NetworkFn
from a2c.tools.human_scores import FULL_LENGTH, SCORES, human_normalized
from a2c.tools.load import NOT_CUSTOM, AfterDecision, Custom, load_policy


class Evaluation(NamedTuple):
    """Whole episodes that a frozen policy has played."""

    config: Config  # that the episodes were played with
    checkpoint: Path
    env_steps: int  # decisions that the policy had learned from
    greedy: bool
    episodes: list[Episode]  # in the order in which they ended

    @property
    def scores(self) -> np.ndarray:
        """Score of each episode `[episodes]` (float64, points)."""
        return np.array([episode.score for episode in self.episodes], dtype=np.float64)

    def summary(self) -> dict[str, Any]:
        """Protocol and results; `interval` is the 95 % interval of the mean, NaN for fewer than five episodes.

        `human_normalized` is None for an Atari game without figures (see `a2c.tools.human_scores`), and where
        episodes may be cut off sooner than in theirs.
        """
        scores, lengths = self.scores, [int(episode.length) for episode in self.episodes]
        return {
            **self._protocol(),
            "checkpoint": str(self.checkpoint),
            "env_steps": self.env_steps,
            "episodes": len(scores),
            "mean": float(scores.mean()),
            "interval": list(interval_of_mean(scores)),
            "standard_deviation": float(scores.std()),
            "median": float(np.median(scores)),
            "min": float(scores.min()),
            "max": float(scores.max()),
            "mean_length": float(np.mean(lengths)),
            **self._normalized(float(scores.mean())),
            "scores": scores.tolist(),
            "lengths": lengths,
        }

    def _protocol(self) -> dict[str, Any]:
        spec, config = checked_spec(self.config), self.config
        atari = {
            "noop_max": config.noop_max,
            "max_episode_frames": config.max_episode_frames,
            "sticky_actions": sticky_probability(config, spec),
        }
        actions = "greedy" if self.greedy else "sampled"
        return {"env": config.env, **(atari if is_atari(spec) else {}), "actions": actions, "seed": config.seed}

    def _normalized(self, mean: float) -> dict[str, Any]:
        """The mean score on the human's scale, and what that scale is; nothing for other environments than Atari."""
        spec = checked_spec(self.config)
        if not is_atari(spec):
            return {}
        random, human = SCORES.get(spec.kwargs["game"], (None, None))
        whole = self.config.max_episode_frames >= FULL_LENGTH
        normalized = human_normalized(spec.kwargs["game"], mean) if whole else None
        return {"human_normalized": normalized, "random_score": random, "human_score": human}


def describe(summary: dict[str, Any]) -> list[str]:
    """What `Evaluation.summary` returns as lines of text, without the single episodes."""
    count, (low, high) = summary["episodes"], summary["interval"]
    interval = f" (95 % interval {low:.2f} to {high:.2f})" if math.isfinite(high - low) else ""
    lines = [
        f"policy    {summary['checkpoint']}, after {summary['env_steps']:,} decisions",
        f"protocol  {count} {'episode' if count == 1 else 'episodes'} of {summary['env']}, seed {summary['seed']}",
        f"          {', '.join(_rules(summary))}",
        f"score     mean {summary['mean']:.2f}{interval}, standard deviation {summary['standard_deviation']:.2f}",
        f"          median {format_number(summary['median'])}, min {format_number(summary['min'])}, "
        f"max {format_number(summary['max'])}",
        f"length    mean {summary['mean_length']:,.1f} decisions",
    ]
    if summary.get("human_normalized") is not None:
        random, human = summary["random_score"], summary["human_score"]
        share = f"{100 * summary['human_normalized']:.1f} %"
        lines.append(f"human     {share} (0 % is a random player, {random:g}; 100 % a human, {human:g})")
    return lines


def as_json(summary: dict[str, Any]) -> str:
    """`summary` of an evaluation as JSON; null for what is NaN or infinite."""
    return json.dumps(_finite(summary), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """`value` with None, for every NaN and infinity, which JSON cannot represent."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rules(summary: dict[str, Any]) -> list[str]:
    """How the episodes were played: actions, and for Atari games sticky actions and no-ops."""
    rules = [f"{summary['actions']} actions"]
    if "sticky_actions" in summary:
        sticky, noops = summary["sticky_actions"], summary["noop_max"]
        rules.append(f"sticky actions {sticky:g}" if sticky else "no sticky actions")
        rules.append(f"up to {noops} no-ops at the start" if noops else "no no-ops")
        if summary["max_episode_frames"] < FULL_LENGTH:
            rules.append(f"cut off after {summary['max_episode_frames']:,} frames")
    return rules


def evaluate(
    run_dir: str | Path,
    episodes: int = 30,
    *,
    checkpoint: str | None = None,
    greedy: bool = False,
    seed: int = 10_000,
    cuda: bool = False,
    threads: int = 0,
    network: NetworkFn | None = None,
    env_fn: EnvFn | None = None,
) -> np.ndarray:
    """Scores `[episodes]` (float64, points) of whole episodes played by the run's frozen policy.

    Actions are sampled from the policy, as in training, or the most likely ones (`greedy`). A lost life does not end
    an episode, rewards are not clipped.

    Args:
        run_dir: a run directory, one that holds an exported policy as `latest.pt`, a checkpoint, or a policy file.
        episodes: how many, at least 1; at most 10 environments play them.
        checkpoint: `latest.pt`, `best.pt` or `policies/...` of the run, or the path of another file; None:
            `best.pt` where there is one, else `latest.pt`.
        greedy: take the most likely actions.
        seed: of environments and sampling, 0 to 2,000,000,000.
        cuda: act on the GPU where there is one.
        threads: compute threads, 0 for one per core.
        network: what the `Trainer` was given.
        env_fn: what the `Trainer` was given.

    Raises:
        ValueError: bad arguments, or an environment is unknown here.
        CheckpointError: a checkpoint cannot be used; it is a ValueError.
        WorkerError: an environment fails.
        FloatingPointError: the policy's outputs are NaN or infinite.
    """
    return play(
        run_dir,
        episodes,
        checkpoint=checkpoint,
        greedy=greedy,
        seed=seed,
        cuda=cuda,
        threads=threads,
        custom=Custom(network, env_fn),
    ).scores


def play(
    run_dir: str | Path,
    episodes: int = 30,
    *,
    checkpoint: str | None = None,
    greedy: bool = False,
    seed: int = 10_000,
    cuda: bool = False,
    threads: int = 0,
    watch: AfterDecision | None = None,
    custom: Custom = NOT_CUSTOM,
) -> Evaluation:
    """Play whole episodes with the run's frozen policy.

    Every environment plays a fixed number of episodes, so that short ones are not favoured.
    Actions are sampled from the policy, as in training, or the most likely ones (`greedy`).
    `threads`: compute threads, 0 for one per core; `watch` is called after each decision of the environments.
    A lost life does not end an episode, rewards are not clipped. Raises what `load_policy` raises, ValueError for
    bad arguments, WorkerError for an environment that fails, FloatingPointError if the policy's outputs are NaN or
    infinite.
    """
    check_count("episodes", episodes)
    seed = Config(seed=seed).seed  # a bad one is refused before a checkpoint is read
    policy = load_policy(run_dir, checkpoint, cuda, custom)
    rows = min(episodes, 10)
    config = replace(policy.config, num_envs=rows, seed=seed, threads=threads, terminal_on_life_loss=False)
    with ExitStack() as closing:
        compute = Compute(config)
        closing.callback(compute.close)
        envs = make_envs(config)
        closing.callback(envs.close)
        closing.callback(compute.wait_idle)  # after Ctrl-C its thread may still step them
        collector = Collector([envs], make_replica(policy.net, compute), 1, compute, seed, greedy)
        quota = np.full(rows, episodes // rows) + (np.arange(rows) < episodes % rows)
        played: list[Episode] = []
        decisions = 0
        while len(played) < episodes:
            for episode in collector.collect().episodes:
                if quota[episode.env] > 0:
                    quota[episode.env] -= 1
                    played.append(episode)
            decisions += rows
            if watch:
                watch(decisions, [episode.score for episode in played])
        return Evaluation(config, policy.checkpoint, policy.env_steps, greedy, played)

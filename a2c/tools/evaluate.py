"""Play a frozen policy and report the true game score."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from a2c.compute.compute import Compute
from a2c.compute.replica import make_replica
from a2c.envs.make import make_envs
from a2c.policy import initial_state, sample, step
from a2c.tools.load import load_policy


def choose(logits: Tensor, greedy: bool, generator: torch.Generator) -> Tensor:
    """Actions `[B]` for `logits [B, A]`: the most likely ones, or drawn. FloatingPointError for NaN or infinity."""
    if not logits.isfinite().all():
        raise FloatingPointError("the policy's logits are NaN or infinite: an observation or a weight is too large")
    return logits.argmax(dim=1) if greedy else sample(logits.float(), generator)[0]


@torch.no_grad()
def evaluate(
    run_dir: str | Path,
    episodes: int = 30,
    *,
    checkpoint: str = "latest.pt",
    greedy: bool = False,
    seed: int = 10_000,
    cuda: bool = False,
) -> np.ndarray:
    """True scores of `episodes` games `[episodes]` that the run's frozen policy plays.

    Every environment plays a fixed number of games, so that short games are not favoured.
    Actions are sampled from the policy, as in training, or the most likely ones (`greedy`).
    Whole games are played: a lost life ends nothing, rewards are not clipped. Raises what `load_policy` raises,
    ValueError for bad arguments, WorkerError for an environment that fails, FloatingPointError where the policy does.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed must be at least 0 and below 2^31, got {seed}")
    config, net, _ = load_policy(Path(run_dir), checkpoint, cuda)
    rows = min(episodes, 10)
    config = replace(config, num_envs=rows, seed=seed, terminal_on_life_loss=False)
    with ExitStack() as closing:
        compute = Compute(config)
        closing.callback(compute.close)
        net = make_replica(net, compute)
        envs = make_envs(config)
        closing.callback(envs.close)
        quota = np.full(rows, episodes // rows) + (np.arange(rows) < episodes % rows)
        generator = torch.Generator(compute.device).manual_seed(seed)
        scores: list[float] = []
        played = np.zeros(rows, np.int64)
        obs, _ = envs.reset()
        rnn_state, starts = initial_state(net, rows, compute.device), np.ones(rows, bool)
        while len(scores) < episodes:
            seen, began = (torch.from_numpy(np.array(x)).to(compute.device) for x in (obs, starts))
            logits, _, rnn_state = step(net, seen, rnn_state, began)
            actions = choose(logits, greedy, generator)
            obs, _, terminated, truncated, info = envs.step(actions.cpu().numpy())
            starts = terminated | truncated
            for game in info["episodes"]:
                if played[game.env] < quota[game.env]:
                    played[game.env] += 1
                    scores.append(game.score)
        return np.array(scores)

"""Observations of real environments that cross to a device, and what arrives there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from a2c.compute.staging import Staging
from a2c.envs.vector_env import MonitoredVectorEnv


def crossings(
    envs: MonitoredVectorEnv, steps: int, newest_only: bool = True, device: str = "cpu"
) -> Iterator[tuple[torch.Tensor, torch.Tensor, np.ndarray]]:
    """Step `envs` with random actions; yields what `Staging` made of each observation, the observation, and `ended`."""
    rng = np.random.default_rng(0)
    first = torch.from_numpy(np.array(envs.reset()[0])).to(device)
    staging, rows = Staging(first, newest_only), [first, torch.zeros_like(first)]
    for t in range(steps):
        obs, _, terminated, truncated, _ = envs.step(rng.integers(envs.single_action_space.n, size=envs.num_envs))
        ended, true = terminated | truncated, np.array(obs)
        staging.store(obs, ended, rows[t % 2], rows[1 - t % 2])
        staging.actions_on_host(torch.zeros(len(obs), dtype=torch.int64, device=device))  # waits
        yield rows[1 - t % 2].cpu().clone(), torch.from_numpy(true), ended

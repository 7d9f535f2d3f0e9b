"""Toys that the tests share: environments whose numbers tell where they come from, and tiny networks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from a2c.compute.compute import Compute
from a2c.compute.replica import sync_replica
from a2c.config.config import Config
from a2c.envs.single import Spaces
from a2c.envs.vector_env import MonitoredVectorEnv
from a2c.update import Minibatch, Terms, clipped_step, compute_gradients, sum_gradients

N_ACTIONS = 5

# No coefficient at its default, so that none can be forgotten on the way.
NO_DEFAULTS = Config(
    threads=1,
    precision="float32",
    gamma=0.9,
    gae_lambda=0.8,
    reward_clip=1.5,
    learning_rate=0.01,
    adam_eps=1e-4,
    entropy_coef=0.05,
    value_coef=0.7,
    max_grad_norm=0.4,
)


class CountingEnv(gym.Env):
    """Shows (index, episode, step); pays `10 * step + action`; ends after `length` decisions.

    `ends` names the flags that the last decision sets: "terminated", "truncated", both or none.
    The step in an observation is the number of decisions taken so far, so a reward tells which
    observation and which action it rewards.
    """

    action_space = gym.spaces.Discrete(N_ACTIONS)

    def __init__(self, index: int, length: int, ends: str = "terminated", dtype: Any = np.uint8) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (3,), dtype)
        self.index, self.length, self.ends = index, length, ends
        self.episode, self.step_count = -1, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.episode, self.step_count = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = 10.0 * self.step_count + float(action)
        self.step_count += 1
        over = self.step_count == self.length
        return self._obs(), reward, over and "terminated" in self.ends, over and "truncated" in self.ends, {}

    def _obs(self) -> np.ndarray:
        return np.array([self.index, self.episode, self.step_count], self.observation_space.dtype)


class ReusingEnv(CountingEnv):
    """Cut off after three decisions; hands out one array, which every step and reset overwrites."""

    def __init__(self) -> None:
        super().__init__(7, 3, "truncated", np.float32)
        self.array = np.zeros(3, np.float32)

    def _obs(self) -> np.ndarray:
        self.array[:] = super()._obs()
        return self.array


class ConstantEnv(gym.Env):
    """One state, reward 1 for every decision, cut off (never terminated) after `length` decisions."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)

    def __init__(self, length: int = 10) -> None:
        self.length, self.step_count = length, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.step_count = 0
        return np.ones(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.step_count += 1
        return np.ones(1, np.float32), 1.0, False, self.step_count == self.length, {}


class DoublesEnv(ConstantEnv):
    """Returns float64 observations, though its space is float32, as many environments do."""

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        obs, info = super().reset(**kwargs)
        return obs.astype(np.float64), info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, *rest = super().step(action)
        return obs.astype(np.float64), *rest


class ClosingEnv(ConstantEnv):
    """Takes `seconds` to close, then makes the file `path`."""

    def __init__(self, seconds: float, path: str) -> None:
        super().__init__()
        self.seconds, self.path = seconds, path

    def close(self) -> None:
        time.sleep(self.seconds)
        Path(self.path).touch()


class IdentityEnv(gym.Env):
    """Shows a random action as one-hot and pays 1 for repeating it; terminates after 10 decisions."""

    action_space = gym.spaces.Discrete(N_ACTIONS)
    observation_space = gym.spaces.Box(0.0, 1.0, (N_ACTIONS,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.step_count = 0
        return self._next(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = float(action == self.wanted)
        self.step_count += 1
        return self._next(), reward, self.step_count == 10, False, {}

    def _next(self) -> np.ndarray:
        self.wanted = int(self.np_random.integers(N_ACTIONS))
        return np.eye(N_ACTIONS, dtype=np.float32)[self.wanted]


class CorridorEnv(gym.Env):
    """Pays 1 at the far end of a corridor; terminates there, or after one and a half times the shortest way."""

    LENGTH = 30
    action_space = gym.spaces.Discrete(2)  # back (a wall behind the first place), ahead
    observation_space = gym.spaces.Box(0.0, LENGTH, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.place = self.step_count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.place = max(0, self.place + (1 if action else -1))
        self.step_count += 1
        arrived = self.place == self.LENGTH
        over = arrived or self.step_count == self.LENGTH * 3 // 2
        return np.full(1, self.place, np.float32), float(arrived), over, False, {}


def vector(*envs: gym.Env) -> MonitoredVectorEnv:
    """The environments side by side, under the package's own contract."""
    return MonitoredVectorEnv(
        SyncVectorEnv([partial(_same, env) for env in envs], autoreset_mode=AutoresetMode.SAME_STEP)
    )


def counting_envs(*lengths: int, ends: str = "terminated", first: int = 0, dtype: Any = np.uint8) -> MonitoredVectorEnv:
    """One `CountingEnv` per length, with the indices `first, first + 1, ...`."""
    return vector(*(CountingEnv(first + i, length, ends, dtype) for i, length in enumerate(lengths)))


class TinyNet(nn.Module):
    """One linear layer for the logits and one for the value."""

    normalizer = None

    def __init__(self, features: int = 3, n_actions: int = N_ACTIONS, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.policy, self.value = nn.Linear(features, n_actions), nn.Linear(features, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        flat = obs.float().flatten(1) / 8
        return self.policy(flat), self.value(flat)


class CertainNet(nn.Module):
    """Always takes the action `(index + step) % 5` of a `CountingEnv`, so that no random number matters."""

    normalizer = None

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        wanted = (obs[:, 0].long() + obs[:, 2].long()) % N_ACTIONS
        return 1e4 * nn.functional.one_hot(wanted, N_ACTIONS).float(), obs.float().sum(1, keepdim=True)


def _same(env: gym.Env) -> gym.Env:
    return env


def play(env: gym.Env, actions: Iterable[int]) -> list[tuple[Any, ...]]:
    """What comes back from each decision, and the first observation of the next episode where one ended; own copies."""
    trace = []
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(int(action))
        seen = np.array(obs)  # an Atari game writes every observation into one array
        first = np.array(env.reset()[0]) if terminated or truncated else None
        trace.append((seen, reward, terminated, truncated, first))
    return trace


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    """Wait until `condition()` is true; AssertionError where it is not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def has_rows(metrics: Path) -> bool:
    """True once a run has written two rows of its metrics.csv."""
    return metrics.exists() and len(metrics.read_text().splitlines()) > 2


def same(a: Any, b: Any) -> bool:
    """Equal in every number of nested values."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


def spaces(obs_shape: tuple[int, ...], n_actions: int, stacked: bool = False) -> Spaces:
    """Spaces of an environment that nobody makes."""
    return Spaces(obs_shape, n_actions, np.dtype(np.uint8 if len(obs_shape) == 3 else np.float32), stacked)


def learn(
    net: nn.Module,
    replica: nn.Module,
    optimizer: torch.optim.Optimizer,
    minibatch: Minibatch,
    config: Config,
    compute: Compute,
    off_policy: bool = True,
) -> tuple[Terms, Tensor]:
    """One step, as `Learner` takes it; what it did and the gradient's norm before clipping."""
    gradients, terms = compute_gradients(replica, minibatch, config, compute, off_policy, config.entropy_coef)
    sum_gradients(net, gradients, terms, compute.ranks)
    norm = clipped_step(net, optimizer, config.max_grad_norm)
    sync_replica(replica, net)
    return terms, norm

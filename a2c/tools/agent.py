"""A trained policy as an object: observations in, actions out."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from a2c.compute.compute import cuda_device
from a2c.envs.single import EnvFn, checked_spec, make_env
from a2c.networks import NetworkFn
from a2c.policy import Policy
from a2c.tools.load import Custom, LoadedPolicy, load_policy


class Agent:
    """The frozen policy of a run; `load` makes one.

    A recurrent policy carries a state for each environment from one call of `act` to the next.
    """

    def __init__(self, loaded: LoadedPolicy, device: torch.device | str, greedy: bool, seed: int) -> None:
        """`device`: where it acts; `seed`: of the sampling."""
        self.config, self.spaces, self.device = loaded.config, loaded.spaces, device
        self.spec = checked_spec(self.config)  # of now: its id may later be that of another environment
        net = loaded.net.to(device)
        self.policy = Policy(net, 0, device, seed, greedy)  # for as many environments as in the last call

    @property
    def obs_shape(self) -> tuple[int, ...]:
        """Shape of one observation."""
        return self.spaces.obs_shape

    def act(self, obs: np.ndarray, starts: np.ndarray | bool = False) -> np.ndarray | int:
        """The action for one observation `obs_shape`, or `[N]` int64 actions for a batch `[N, *obs_shape]`.

        `starts`, or `[N]` of them: the observation begins an episode, which matters only to a recurrent policy. A
        first call, or one with another N, begins episodes anyway. Raises ValueError for observations or starts of
        another shape and for pixels that are not uint8, FloatingPointError if the network's outputs are NaN or
        infinite.
        """
        if isinstance(obs, tuple) and obs and isinstance(obs[-1], dict):
            raise ValueError("obs must be an array, got a tuple: reset() returns (obs, info)")
        obs, one = np.array(obs), np.ndim(obs) == len(self.obs_shape)  # a copy: it may not be writable
        batch = obs[None] if one else obs
        if batch.shape[1:] != self.obs_shape or len(batch) == 0:
            raise ValueError(f"obs must have shape {list(self.obs_shape)}, or [N, ...] of them, got {list(obs.shape)}")
        if self.spaces.stacked and obs.dtype != np.uint8:
            raise ValueError(f"obs must be pixels of dtype uint8, got {obs.dtype}")
        if np.can_cast(batch.dtype, self.spaces.obs_dtype, "same_kind"):  # environments may return float64 for float32
            batch = batch.astype(self.spaces.obs_dtype)
        if np.shape(starts) not in ((), (len(batch),)):
            raise ValueError(f"starts must be one value or have shape [{len(batch)}], got {list(np.shape(starts))}")
        if len(self.policy.rnn_state) != len(batch):
            self.policy.begin(len(batch))
        begun = torch.from_numpy(np.full(len(batch), starts, dtype=bool)).to(self.device)
        actions: np.ndarray = self.policy.act(torch.from_numpy(batch).to(self.device), begun).actions.cpu().numpy()
        actions += self.spaces.first_action
        return int(actions[0]) if one else actions

    def make_env(self, seed: int = 0, render_mode: str | None = None) -> gym.Env:
        """One environment with the preprocessing of the training; ValueError if it cannot be made here."""
        return make_env(self.config, self.spec, seed, render_mode)


def load(
    run_dir: str | Path,
    checkpoint: str | None = None,
    *,
    greedy: bool = False,
    seed: int = 0,
    cuda: bool = False,
    network: NetworkFn | None = None,
    env_fn: EnvFn | None = None,
) -> Agent:
    """The frozen policy of a run, of a directory that holds an exported one as `latest.pt`, or of a file.

    `checkpoint`, `network`, `env_fn`: as in `evaluate`, and so are ValueError, CheckpointError and WorkerError. The
    agent samples actions with the seed `seed`, or takes the most likely ones (`greedy`). It computes in float32, on the
    CPU or, with `cuda`, on the GPU where there is one.
    """
    loaded = load_policy(run_dir, checkpoint, cuda, Custom(network, env_fn))
    return Agent(loaded, cuda_device() if cuda and torch.cuda.is_available() else "cpu", greedy, seed)

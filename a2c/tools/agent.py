"""A trained policy as an object: observations in, actions out."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from a2c.config.config import Config
from a2c.envs.single import checked_spec, make_env
from a2c.policy import Policy
from a2c.tools.load import load_policy


class Agent:
    """The frozen policy of a run; `load` makes one.

    A recurrent policy carries a state for each environment from one call of `act` to the next.
    """

    def __init__(self, config: Config, net: nn.Module, obs_shape: tuple[int, ...], greedy: bool, seed: int) -> None:
        """`config`: of the run; `net`: its network, on the device where it acts."""
        self.config, self.net, self.obs_shape = config, net, obs_shape
        self.greedy, self.seed = greedy, seed
        self.device = next(net.parameters()).device
        self.policy: Policy | None = None  # for as many environments as there were in the last call

    def act(self, obs: np.ndarray, starts: np.ndarray | bool = False) -> np.ndarray | int:
        """The action for one observation `obs_shape`, or `[N]` int64 actions for a batch `[N, *obs_shape]`.

        `starts`, or `[N]` of them: the observation begins an episode, which matters to a recurrent policy alone. A
        first call, or one with another N, begins episodes anyway. Raises ValueError for an observation of another
        shape, FloatingPointError where the network's outputs are NaN or infinite.
        """
        obs, one = np.asarray(obs), np.ndim(obs) == len(self.obs_shape)
        batch = obs[None] if one else obs
        if batch.shape[1:] != self.obs_shape or len(batch) == 0:
            raise ValueError(f"obs must have shape {list(self.obs_shape)}, or [N, ...] of them, got {list(obs.shape)}")
        if self.policy is None or len(self.policy.rnn_state) != len(batch):
            self.policy = Policy(self.net, len(batch), self.device, self.seed, self.greedy)
        begun = torch.from_numpy(np.broadcast_to(np.asarray(starts, dtype=bool), len(batch)).copy())
        decision = self.policy.act(torch.from_numpy(np.ascontiguousarray(batch)).to(self.device), begun.to(self.device))
        actions: np.ndarray = decision.actions.cpu().numpy()
        return int(actions[0]) if one else actions

    def make_env(self, seed: int = 0, render_mode: str | None = None) -> gym.Env:
        """One environment with the preprocessing of the training; ValueError where it cannot be made here."""
        return make_env(self.config, checked_spec(self.config), seed, render_mode)


def load(
    run_dir: str | Path, checkpoint: str = "latest.pt", *, greedy: bool = False, seed: int = 0, cuda: bool = False
) -> Agent:
    """The frozen policy of a run, or of a directory with an exported one; arguments and errors as in `evaluate`.

    It acts on the CPU, or on the GPU with `cuda`, where there is one.
    """
    config, net, state = load_policy(Path(run_dir), checkpoint, cuda)
    net.to("cuda" if cuda and torch.cuda.is_available() else "cpu")
    return Agent(config, net, tuple(state["input_shape"]), greedy, seed)

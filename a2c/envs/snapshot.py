"""Environments that can be saved and restored bit for bit while they run, from other processes too."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import gymnasium as gym

from a2c.envs.layers import Snapshot, restore_layers, save_layers


class SnapshotWrapper(gym.Wrapper):
    """Gives an environment the attribute `snapshot`, which can be read and set, also from another process.

    An exception becomes a RuntimeError whose text is the traceback: gymnasium passes on its type and text only.
    """

    exact = True  # the last snapshot that was set held everything, and was restored exactly
    refusal = ""  # in one line, why it was refused; empty unless it is damaged

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        try:
            return self.env.reset(**kwargs)
        except Exception:
            raise RuntimeError(traceback.format_exc()) from None

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
        except Exception:
            raise RuntimeError(traceback.format_exc()) from None
        if terminated or truncated:  # the reset that follows may overwrite the array
            obs = copy.deepcopy(obs)
        return obs, reward, terminated, truncated, info

    @property
    def snapshot(self) -> Snapshot:
        """The state of the environment, as plain values."""
        return save_layers(self.env)

    @snapshot.setter
    def snapshot(self, snapshot: Snapshot) -> None:
        self.refusal = ""
        try:
            self.exact = restore_layers(self.env, snapshot)
        except Exception as error:  # damaged content can raise almost anything
            self.exact, self.refusal = False, " ".join(f"{type(error).__name__}: {error}".split())[:120]

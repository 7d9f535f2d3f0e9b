"""Saving and restoring one environment bit for bit: its emulator and every wrapper around it.

A snapshot is the list of an environment's layers, outermost first, each as the plain values
among its attributes: numbers, texts, arrays, random generators, and the emulator's own state.
No torch may enter this room.
"""

from __future__ import annotations

import copy
import traceback
from collections import deque
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from a2c.config import Config

Snapshot = list[dict[str, Any]]
PLAIN = (bool, int, float, str, type(None), np.generic)
STATEFUL = (ale_py.ALEInterface, np.random.Generator)  # have a snapshot of their own, as attributes
CONSTANT = (ale_py.Action, gym.Space, EnvSpec, Config)


class Resumable(gym.Wrapper):
    """Gives an environment the attribute `snapshot`, which can be read and set, also from another process.

    An exception becomes a RuntimeError whose text is the traceback: nothing else crosses a pipe.
    """

    exact = True  # the snapshot that was set last holds everything, and the emulator took it

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
        if terminated or truncated:  # it may live in an array that the reset overwrites before anybody has read it
            obs = copy.deepcopy(obs)
        return obs, reward, terminated, truncated, info

    @property
    def snapshot(self) -> Snapshot:
        """The state of the environment, as plain values."""
        return [_values(layer) for layer in _layers(self.env)]

    @snapshot.setter
    def snapshot(self, snapshot: Snapshot) -> None:
        layers = _layers(self.env)
        self.exact = all([_restore(layer, values) for layer, values in zip(layers, snapshot, strict=True)])
        self.exact &= not any(_is_opaque(v) for layer in layers for name, v in vars(layer).items() if name != "env")


def _layers(env: gym.Env) -> list[gym.Env]:
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _values(layer: gym.Env) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if isinstance(value, ale_py.ALEInterface):
            state = value.cloneState(include_rng=True).serialize()
            values[name] = {"emulator": np.frombuffer(state, np.uint8).copy()}
        elif isinstance(value, np.random.Generator):
            values[name] = {"generator": value.bit_generator.state}
        elif isinstance(value, deque) and _is_plain(list(value)):
            values[name] = {"deque": copy.deepcopy(list(value))}
        elif isinstance(value, list | tuple | dict) and _is_plain(value):
            values[name] = {"value": copy.deepcopy(value)}
        elif _is_plain(value):
            values[name] = copy.deepcopy(value)
    return values


def _is_plain(value: Any) -> bool:
    """True for what a snapshot can hold: numbers, texts, arrays of numbers, and containers of these."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(isinstance(key, bool | int | float | str) for key in value) and all(map(_is_plain, value.values()))
    return isinstance(value, PLAIN)


def _is_opaque(value: Any) -> bool:
    """True for an object that may hold state which no snapshot sees, such as a physics engine's world."""
    if isinstance(value, list | tuple | deque):
        return any(_is_opaque(item) or isinstance(item, STATEFUL) for item in value)
    if isinstance(value, dict):
        keys = all(isinstance(key, bool | int | float | str) for key in value)
        return not keys or _is_opaque(list(value.values()))
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "biufSU"  # texts, such as the map of a lake, do not change
    return not (_is_plain(value) or callable(value) or isinstance(value, (*STATEFUL, *CONSTANT)))


def _restore(layer: gym.Env, values: dict[str, Any]) -> bool:
    """Give a layer its values back; False where its emulator did not take its own state."""
    exact = True
    for name, value in values.items():
        if not isinstance(value, dict):
            setattr(layer, name, copy.deepcopy(value))
            continue
        (kind, content), current = next(iter(value.items())), getattr(layer, name, None)
        if current is None and kind != "value":
            return False
        if kind == "emulator":
            current.restoreState(ale_py.ALEState(content.tobytes()))
            exact = current.cloneState(include_rng=True).serialize() == content.tobytes()
        elif kind == "generator":
            current.bit_generator.state = content
        elif kind == "deque":
            setattr(layer, name, deque(copy.deepcopy(content), maxlen=current.maxlen))
        else:
            setattr(layer, name, copy.deepcopy(content))
    return exact

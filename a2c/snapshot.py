"""Saving and restoring one environment bit for bit: its emulator and every wrapper around it.

A snapshot is the list of an environment's layers, outermost first, each as the plain values
among its attributes: numbers, texts, arrays, random generators, and the emulator's own state.
No torch may enter this room.
"""

from __future__ import annotations

import traceback
from collections import deque
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np

Snapshot = list[dict[str, Any]]
REPEATS = 100  # even at a sticky probability of 0.9 an action that is repeated so often has come through
PLAIN = (bool, int, float, str, type(None), np.generic, np.ndarray)


class Resumable(gym.Wrapper):
    """Gives an environment the attribute `snapshot`, which can be read and set, also from another process.

    An exception becomes a RuntimeError whose text is the traceback: nothing else crosses a pipe.
    """

    exact = True  # the emulator is where the snapshot last set had it

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        try:
            return self.env.reset(**kwargs)
        except Exception:
            raise RuntimeError(traceback.format_exc()) from None

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            return self.env.step(action)
        except Exception:
            raise RuntimeError(traceback.format_exc()) from None

    @property
    def snapshot(self) -> Snapshot:
        """The state of the environment, as plain values."""
        return [_values(layer) for layer in _layers(self.env)]

    @snapshot.setter
    def snapshot(self, snapshot: Snapshot) -> None:
        layers = _layers(self.env)
        self.exact = all([_restore(layer, values) for layer, values in zip(layers, snapshot, strict=True)])


def _layers(env: gym.Env) -> list[gym.Env]:
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _values(layer: gym.Env) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
            continue  # texts and objects: constants of the environment
        if isinstance(value, ale_py.ALEInterface):
            state = value.cloneState(include_rng=True).serialize()
            values[name] = {"emulator": np.frombuffer(state, np.uint8).copy()}
        elif isinstance(value, np.random.Generator):
            values[name] = {"generator": value.bit_generator.state}
        elif isinstance(value, PLAIN):
            values[name] = np.array(value) if isinstance(value, np.ndarray) else value
        elif isinstance(value, list | tuple | deque) and all(isinstance(item, PLAIN) for item in value):
            kind = type(value).__name__
            values[name] = {kind: [np.array(v) if isinstance(v, np.ndarray) else v for v in value]}
    return values


def _restore(layer: gym.Env, values: dict[str, Any]) -> bool:
    """Give a layer its values back; False where its emulator did not take its own state."""
    exact = True
    for name, value in values.items():
        if not isinstance(value, dict):
            setattr(layer, name, value)
            continue
        (kind, content), current = next(iter(value.items())), getattr(layer, name)
        if kind == "emulator":
            for _ in range(REPEATS):  # a sticky emulator keeps its last action outside of its state
                current.act(layer._action_set[values["last_action"]])
            current.restoreState(ale_py.ALEState(content.tobytes()))
            exact = current.cloneState(include_rng=True).serialize() == content.tobytes()
        elif kind == "generator":
            current.bit_generator.state = content
        elif kind == "deque":
            setattr(layer, name, deque(content, maxlen=current.maxlen))
        else:
            setattr(layer, name, {"list": list, "tuple": tuple}[kind](content))
    return exact

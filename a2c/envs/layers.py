"""The state of one environment and of every wrapper around it, as plain values.

A snapshot is the list of the environment's layers, outermost first, each as the plain values among its attributes:
numbers, strings, arrays, random generators. An attribute that may be state and cannot be saved is marked as lost, and
then no environment is restored exactly. `AtariGame` has its own `get_state` and `set_state`.
"""

from __future__ import annotations

import copy
import types
from collections import deque
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from a2c.config.config import Config
from a2c.envs.atari import AtariGame

Snapshot = list[dict[str, Any]]
PLAIN = (bool, int, float, str, type(None))
KEYS = (bool, int, float, str, np.str_)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)
HARMLESS = (*FUNCTIONS, gym.Space, EnvSpec, Config, ale_py.Action)  # hold no state
INTO: dict[str, Any] = {"generator": np.random.Generator, "deque": deque}  # types of attributes
LOST = {"lost": True}  # in place of a value that a snapshot cannot hold


def save_layers(env: gym.Env) -> Snapshot:
    """The state of `env`, layer by layer."""
    return [_values(layer) for layer in _layers(env)]


def restore_layers(env: gym.Env, snapshot: Snapshot) -> bool:
    """Restore what `save_layers` gave; False where it does not hold everything or is not taken exactly.

    Damaged content can raise almost anything.
    """
    return all([_restore(layer, values) for layer, values in zip(_layers(env), snapshot, strict=True)])


def _layers(env: gym.Env) -> list[gym.Env]:
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _attributes(layer: gym.Env) -> dict[str, Any]:
    """The attributes that may hold state; none of an `AtariGame`, which has its own `get_state`."""
    if isinstance(layer, AtariGame):
        return {}
    # gymnasium keeps the arguments of a wrapper's constructor in `_saved_kwargs`.
    return {k: v for k, v in vars(layer).items() if k not in ("env", "_saved_kwargs") and not _is_harmless(v)}


def _values(layer: gym.Env) -> dict[str, Any]:
    if isinstance(layer, AtariGame):
        return layer.get_state()
    values: dict[str, Any] = {}
    for name, value in _attributes(layer).items():
        if isinstance(value, np.random.Generator):
            values[name] = {"generator": value.bit_generator.state}
        elif type(value) is deque and _is_plain(list(value)):
            values[name] = {"deque": _plain_copy(list(value))}
        elif type(value) is np.ndarray and value.dtype.kind in "SU":  # such as the map of FrozenLake
            values[name] = {"text": [value.dtype.str, list(value.shape), np.frombuffer(value.tobytes(), np.uint8)]}
        elif not _is_plain(value):
            values[name] = LOST
        else:
            held = _plain_copy(value)
            values[name] = {"value": held} if isinstance(held, list | tuple | dict) else held
    return values


def _is_plain(value: Any) -> bool:
    """Whether a snapshot can hold the value: numbers, strings, arrays of numbers, and containers of these."""
    if type(value) is np.ndarray:
        return value.dtype.kind in "biuf" and value.dtype.isnative and value.dtype.itemsize <= 8
    if isinstance(value, np.generic):
        return isinstance(value, np.str_) or _is_plain(np.asarray(value))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) in KEYS for key in value) and all(map(_is_plain, value.values()))
    return type(value) in PLAIN


def _plain_copy(value: Any) -> Any:
    """A deep copy of a plain value, with numpy's strings as Python's, which a checkpoint can hold."""
    if isinstance(value, np.str_):
        return str(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_plain_copy, value))
    if isinstance(value, dict):
        return {_plain_copy(key): _plain_copy(item) for key, item in value.items()}
    return copy.deepcopy(value)


def _is_harmless(value: Any) -> bool:
    """Whether the value holds no state: functions, classes, spaces, and tuples of these."""
    return isinstance(value, HARMLESS) or (type(value) is tuple and all(map(_is_harmless, value)))


def _restore(layer: gym.Env, values: dict[str, Any]) -> bool:
    """Give a layer its values back; False where it is not exactly as it was."""
    if isinstance(layer, AtariGame):
        return layer.set_state(values)
    exact = _attributes(layer).keys() <= values.keys()
    for name, value in values.items():
        kind, content = next(iter(value.items())) if isinstance(value, dict) else ("value", value)
        if kind == "lost":
            exact = False
            continue
        current: Any = getattr(layer, name, None)
        if callable(current):
            raise ValueError(f"{name} must not be a method of the environment, got a value for it")
        if kind in INTO and type(current) is not INTO[kind]:
            return False
        if kind == "generator":
            current.bit_generator.state = content
            continue
        new: Any = _strings(*content) if kind == "text" else copy.deepcopy(content)
        if kind == "deque":
            new = deque(new, maxlen=current.maxlen)
        if isinstance(current, np.ndarray) and isinstance(new, np.ndarray) and not _fits(new, current):
            return False
        setattr(layer, name, new)
    return exact


def _strings(dtype: str, shape: list[int], content: np.ndarray) -> np.ndarray:
    """An array of strings, of a `dtype` such as "<U4", from its bytes."""
    return np.frombuffer(content.tobytes(), dtype).reshape(shape).copy()


def _fits(new: np.ndarray, current: np.ndarray) -> bool:
    """Same shape and kind of numbers; not the same precision: Acrobot changes from float32 to float64."""
    return (new.shape, new.dtype.kind) == (current.shape, current.dtype.kind)

"""The state of one environment and of every wrapper around it, as plain values.

A snapshot is the list of the environment's layers, outermost first, each as the plain values among its attributes:
numbers, strings, arrays, random generators. An attribute that may be state and cannot be saved is marked as lost, and
then no environment is restored exactly. `AtariGame` has its own `get_state` and `set_state`.
"""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Iterator
from itertools import combinations
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
CODE = (types.FunctionType, type, types.ModuleType)
HARMLESS = (*CODE, EnvSpec, Config, ale_py.Action)  # hold no state
INTO: dict[str, Any] = {"generator": np.random.Generator, "deque": deque}  # types of attributes
LOST = {"lost": True}  # in place of a value that a snapshot cannot hold


def save_layers(env: gym.Env) -> Snapshot:
    """The state of `env`, layer by layer."""
    layers, places = _layers(env), dict[int, list[Any]]()  # where each value that can change is first met
    snapshot, entangled = [_values(layer) for layer in layers], _entangled(layers)
    for number, layer in enumerate(layers):
        for name, value in _attributes(layer).items():
            if id(value) in entangled:
                snapshot[number][name] = LOST
            elif isinstance(value, list | dict | deque | np.ndarray):
                first = places.setdefault(id(value), [number, name])
                if first != [number, name]:
                    snapshot[number][name] = {"same": first}
    return snapshot


def restore_layers(env: gym.Env, snapshot: Snapshot) -> bool:
    """Restore what `save_layers` gave; False if it does not hold everything or was not restored exactly.

    Damaged content can raise almost anything.
    """
    layers = _layers(env)
    return all([_restore(layer, values, layers) for layer, values in zip(layers, snapshot, strict=True)])


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


def _entangled(layers: list[gym.Env]) -> set[int]:
    """Ids of attributes' values that share a part with another's, such as a view of an array: restored, each would have
    its own.
    """
    values = [value for layer in layers for value in _attributes(layer).values()]
    arrays = {id(value): value for value in values if isinstance(value, np.ndarray)}
    pairs = [(a, b) for a, b in combinations(arrays, 2) if np.shares_memory(arrays[a], arrays[b])]
    owners: dict[int, set[int]] = {}  # ids of the values that hold a list or dict
    for value in values:
        for part in _containers(value):
            owners.setdefault(id(part), set()).add(id(value))
    return {one for ids in [*pairs, *owners.values()] if len(ids) > 1 for one in ids}


def _containers(value: Any) -> Iterator[Any]:
    """The lists, dicts and deques that a plain value consists of, itself included."""
    if type(value) in (list, dict, deque):
        yield value
    if type(value) in (list, tuple, dict, deque):
        for item in value.values() if type(value) is dict else value:
            yield from _containers(item)


def _parts(space: gym.Space[Any]) -> list[gym.Space[Any]]:
    """A space and those that it consists of."""
    inner = getattr(space, "spaces", ())
    return [space, *(part for one in (inner.values() if isinstance(inner, dict) else inner) for part in _parts(one))]


def _drawn(space: gym.Space[Any]) -> Any:
    """The state of a space's generator; None if it has drawn nothing: gymnasium's vector environments make one."""
    bits: Any = space._np_random.bit_generator if space._np_random else None
    return bits.state if bits and bits.state != type(bits)(bits.seed_seq).state else None


def _values(layer: gym.Env) -> dict[str, Any]:
    if isinstance(layer, AtariGame):
        return layer.get_state()
    values: dict[str, Any] = {}
    for name, value in _attributes(layer).items():
        if isinstance(value, np.random.Generator):
            values[name] = {"generator": value.bit_generator.state}
        elif isinstance(value, gym.Space):
            if any(drawn := [_drawn(part) for part in _parts(value)]):
                values[name] = {"space": drawn}
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
    """Whether the value holds no state: functions, classes, and tuples of these."""
    if isinstance(value, types.BuiltinFunctionType | types.MethodType):  # a method may be another object's
        return isinstance(value.__self__, (gym.Env, type(None), *CODE))
    return isinstance(value, HARMLESS) or (type(value) is tuple and all(map(_is_harmless, value)))


def _restore(layer: gym.Env, values: dict[str, Any], layers: list[gym.Env]) -> bool:
    """Give a layer its values back; False if it is not exactly as it was."""
    if isinstance(layer, AtariGame):
        return layer.set_state(values)
    spaces = {name for name, value in _attributes(layer).items() if isinstance(value, gym.Space)}
    exact = _attributes(layer).keys() - spaces <= values.keys()  # one that has drawn nothing is left out
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
        if kind == "space":
            for part, state in zip(_parts(current), content, strict=True):
                if state is not None:
                    part.np_random.bit_generator.state = state
            continue
        if kind == "same":
            number, other = content
            setattr(layer, name, _attributes(layers[number])[other])  # which has been restored before
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

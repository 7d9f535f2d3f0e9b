"""What a setting may be: the range of every number, and the rules between settings.

Kinds are read off the annotations of the dataclass, so that a new setting cannot be forgotten.
It imports neither torch nor gymnasium.
"""

from __future__ import annotations

import difflib
import math
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

FRAME_SKIP = 4  # emulator frames per agent decision, in every backend

INT_RULES = {
    "num_envs": (1, 10_000),
    "workers": (0, 1024),
    "frame_size": (36, 512),
    "frame_stack": (1, 16),
    "noop_max": (0, 10_000),
    "max_episode_frames": (FRAME_SKIP, 2**31 - 1),
    "lstm_units": (0, 65_536),
    "rollout_steps": (1, 100_000),
    "num_minibatches": (1, 10_000),
    "sliding_batch": (0, 1_000_000),
    "total_env_steps": (1, 10**15),
    "stop_after": (0, 10**15),
    "seed": (0, 2_000_000_000),
    "threads": (0, 1024),
    "checkpoint_every": (1, 10**15),
    "max_worker_restarts": (0, 1_000_000),
}
FLOAT_RULES = {
    "sticky_actions": (0.0, 1.0),
    "reward_clip": (0.0, 1e9),
    "gamma": (0.0, 1.0),
    "gae_lambda": (0.0, 1.0),
    "learning_rate": (0.0, 10.0),
    "adam_eps": (0.0, 1.0),
    "rmsprop_decay": (0.0, 1.0),
    "rmsprop_eps": (0.0, 1.0),
    "entropy_coef": (0.0, 100.0),
    "value_coef": (0.0, 100.0),
    "log_eps": (0.0, 1.0),
    "max_grad_norm": (0.0, 1e9),
    "target_score": (-1e12, 1e12),
    "log_every": (0.0, 86_400.0),
    "env_timeout": (0.0, 86_400.0),
}
ABOVE_ZERO = ("learning_rate", "adam_eps", "rmsprop_eps", "log_every", "env_timeout")


def check(config: Any) -> None:
    """Raise ValueError naming the field, the rule and the value of the first bad setting of a `Config`."""
    for name, hint in _hints(type(config)).items():  # type: ignore[arg-type]  # a class is hashable
        value = getattr(config, name)
        if get_origin(hint) is Literal:
            check_choice(name, value, get_args(hint))
        elif hint is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, got {value!r}")
        elif name in INT_RULES:
            _check_number(name, value, *INT_RULES[name], integer=True)
        elif name in FLOAT_RULES and not (value is None and NoneType in get_args(hint)):
            _check_number(name, value, *FLOAT_RULES[name])
    for name in ABOVE_ZERO:
        if getattr(config, name) <= 0:
            raise ValueError(f"{name} must be above 0, got {getattr(config, name)}")
    if not config.env or not isinstance(config.env, str):
        raise ValueError(f"env must be a Gymnasium id, got {config.env!r}")
    if config.resume is not None and config.run_dir is not None:
        raise ValueError(f"run_dir must be left out when resume is set, got {config.run_dir}")
    if config.sliding_batch:
        _check_sliding(config)
    if config.algorithm != "a2c" and config.deterministic:
        raise ValueError(f"deterministic must be off for algorithm {config.algorithm}, whose order is chance, got True")
    most = min(config.num_minibatches, config.num_envs)
    if config.algorithm == "a3c" and config.workers > most:
        raise ValueError(
            f"workers must be at most num_minibatches ({most}) for algorithm a3c, where each learns whole batches, "
            f"got {config.workers}: raise num_minibatches or num_envs"
        )
    if config.crop and config.backend == "native":
        raise ValueError("crop must be off for backend native, which always scales the whole screen, got True")


def _check_sliding(config: Any) -> None:
    for name, only in (("gae_lambda", 1), ("num_minibatches", 1), ("algorithm", "a2c")):
        if getattr(config, name) != only:
            raise ValueError(f"{name} must be {only} when sliding_batch is set, got {getattr(config, name)}")
    if config.network == "lstm":
        raise ValueError("network must have no memory when sliding_batch is set, got lstm")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def nearest(name: str, known: tuple[str, ...] | list[str]) -> str:
    """A readable hint with the names closest to `name`, or all of them where none is close."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(known)[:20])}"


def check_choice(field: str, value: Any, known: tuple[str, ...]) -> None:
    """ValueError with the nearest names where `value` is not one of `known`."""
    if value not in known:
        raise ValueError(
            f"{field} must be one of {', '.join(sorted(known))}, got {value!r}; {nearest(str(value), known)}"
        )


def _check_number(field: str, value: Any, low: float, high: float, integer: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        raise ValueError(f"{field} must be {'an integer' if integer else 'a number'}, got {value!r}")
    if math.isnan(value) or not low <= value <= high:
        raise ValueError(f"{field} must be at least {low} and at most {high}, got {value}")

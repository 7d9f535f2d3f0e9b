"""What the files of a run say, read without a checkpoint and without torch.

A run directory may come from somebody else, and may be of an older version: every value is checked where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from a2c.envs.atari import FRAME_SKIP
from a2c.envs.single import is_atari
from a2c.metrics.files import BLOCK, open_regular, read_table
from a2c.metrics.results import finite_rows, moving_mean, read_finite_episodes

SCORE = "reward_100"  # the metric that is read from episodes.csv


class Series(NamedTuple):
    """Values of a run, all finite: three arrays `[points]`, `env_steps` in rising order."""

    env_steps: np.ndarray
    seconds: np.ndarray
    values: np.ndarray


def read_series(run_dir: Path, metric: str = SCORE) -> Series:
    """A column of a run's metrics.csv, or, for the default, the mean of the last 100 episodes at each of them.

    Empty if there is no file. OSError or ValueError if it cannot be read or has no such column.
    """
    try:
        if metric == SCORE:
            table = read_finite_episodes(run_dir)
            return Series(table["env_steps"], table["seconds"], moving_mean(table["score"]))
        table = finite_rows(read_table(run_dir / "metrics.csv", tuple(dict.fromkeys(("env_steps", "seconds", metric)))))
        return Series(table["env_steps"], table["seconds"], table[metric])
    except FileNotFoundError:
        return Series(np.empty(0), np.empty(0), np.empty(0))


def number_in(settings: dict[str, Any], name: str) -> float | None:
    """The setting `name` where it is a finite number, else None."""
    value = settings.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer of hundreds of digits
            return value if math.isfinite(value) else None
    return None


def frames_per_decision(env: object) -> int:
    """Frames of the emulator per decision in the environment with this id; 1 where there is no emulator.

    An id that names a module to import (`module:id`) counts as one without: nothing is imported.
    """
    spec = gym.registry.get(env) if isinstance(env, str) else None
    return FRAME_SKIP if spec is not None and is_atari(spec) else 1


def read_columns(path: Path, columns: Iterable[str]) -> dict[str, np.ndarray]:
    """Those of the named columns that a table has, as `read_table` returns them; none if there is no file."""
    try:
        with open(path, encoding="ascii", errors="replace", opener=open_regular) as file:
            names = file.readline(BLOCK).strip().split(",")
        return read_table(path, [name for name in columns if name in names])
    except FileNotFoundError:
        return {}

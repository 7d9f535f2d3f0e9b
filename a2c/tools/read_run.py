"""What the files of a run say, read without a checkpoint and without torch.

A run directory may come from somebody else, and may be of an older version: every value is checked where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from a2c.envs.atari import FRAME_SKIP
from a2c.envs.single import is_atari
from a2c.metrics.files import BLOCK, open_regular, read_table


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
    """Those of the named columns that a table has, as `read_table` returns them; none where there is no file."""
    try:
        with open(path, encoding="ascii", errors="replace", opener=open_regular) as file:
            names = file.readline(BLOCK).strip().split(",")
        return read_table(path, [name for name in columns if name in names])
    except FileNotFoundError:
        return {}

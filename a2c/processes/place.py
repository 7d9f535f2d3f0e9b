"""Where a process stands among those that torchrun has started. Nothing heavy is imported here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class Place(NamedTuple):
    """Where a process stands among those that learn together, and among those of its host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """What torchrun has written into the environment; alone where it has not started this process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in environ or not all(name in environ for name in names):
        return Place()
    return Place(*(int(environ[name]) for name in names))

"""a2c: synchronous, vectorised advantage actor-critic for Atari, with A3C and GA3C.

The public names are imported on first use, so that an environment worker, which imports `a2c.envs.make`, does not
import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from a2c.collector import Collector as Collector
    from a2c.config.config import Config as Config
    from a2c.config.presets import PRESETS as PRESETS
    from a2c.envs.make import make_envs as make_envs
    from a2c.losses import a2c_loss as a2c_loss
    from a2c.networks import AtariA2C as AtariA2C
    from a2c.returns import lambda_returns as lambda_returns
    from a2c.rollout import Rollout as Rollout
    from a2c.run.trainer import Trainer as Trainer
    from a2c.tools.agent import load as load
    from a2c.tools.evaluate import evaluate as evaluate
    from a2c.tools.record_video import record_video as record_video
    from a2c.transitions import Experience as Experience
    from a2c.transitions import unpack_batch as unpack_batch

__version__ = "0.4.0"
_MODULES = {
    "AtariA2C": "networks",
    "Collector": "collector",
    "Config": "config.config",
    "Experience": "transitions",
    "PRESETS": "config.presets",
    "Rollout": "rollout",
    "Trainer": "run.trainer",
    "a2c_loss": "losses",
    "evaluate": "tools.evaluate",
    "lambda_returns": "returns",
    "load": "tools.agent",
    "make_envs": "envs.make",
    "record_video": "tools.record_video",
    "unpack_batch": "transitions",
}
__all__ = list(_MODULES)


if not TYPE_CHECKING:  # a type checker that saw it would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'a2c' has no attribute {name!r}")
        return getattr(importlib.import_module(f"a2c.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""Policy files: what is needed to act, without the rest of a checkpoint, and those that a run keeps in `policies/`.

A policy file is loaded by `load_checkpoint`. It holds the network with its normaliser, the config and env_steps.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from a2c.config.config import PER_SESSION, Config
from a2c.metrics.files import TEMPORARY
from a2c.run.checkpoint import POLICY, save_checkpoint
from a2c.run.run_dir import POLICIES

KEPT = re.compile(r"(\d{9,})\.pt")  # their names: the decisions learned from


def save_policy(path: Path, state: dict[str, Any], half: bool = False) -> None:
    """Write a policy file: the part of the checkpoint `state` that is needed to act.

    `half`: parameters as float16; ValueError if one is too large for it. OSError if the disk refuses, which
    leaves an old file untouched.
    """
    policy = {name: state[name] for name in POLICY if name in state}
    policy["config"] = policy_config(state)
    if half:
        policy["network"] = {name: _half(name, value) for name, value in state["network"].items()}
    save_checkpoint(path, policy)


def policy_config(state: dict[str, Any]) -> str:
    """The config of the checkpoint `state` as JSON, without the settings of a session."""
    config = json.loads(state["config"]) | {name: getattr(Config, name) for name in PER_SESSION}
    return json.dumps(config, indent=2) + "\n"


def keep_policy(run_dir: Path, state: dict[str, Any]) -> None:
    """Write `state` to `policies/` of the run, in a file named by its env_steps; OSError if the disk refuses."""
    (run_dir / POLICIES).mkdir(exist_ok=True)
    save_policy(run_dir / POLICIES / f"{state['env_steps']:09}.pt", state)


def kept_policies(run_dir: Path) -> dict[int, Path]:
    """The policy files that a run has kept, by their env_steps in rising order; OSError if they cannot be listed."""
    folder = run_dir / POLICIES
    paths = list(folder.iterdir()) if folder.is_dir() else []
    return dict(sorted((int(name[1]), path) for path in paths if (name := KEPT.fullmatch(path.name))))


def drop_policies(run_dir: Path, env_steps: int) -> None:
    """Remove the kept policies of more than `env_steps` decisions, and what a killed process left half-written."""
    for path in (run_dir / POLICIES).glob(f"*.pt{TEMPORARY}"):
        path.unlink()
    for steps, path in kept_policies(run_dir).items():
        if steps > env_steps:
            path.unlink()


def _half(name: str, value: torch.Tensor) -> torch.Tensor:
    """A parameter as float16; statistics, in float64 and int64, as they are."""
    if value.dtype != torch.float32:
        return value
    if not value.half().isfinite().all():
        raise ValueError(f"half must be off for this policy, got True: {name} is too large for float16")
    return value.half()

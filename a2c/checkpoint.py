"""Saving and loading a run: written atomically, loaded without executing anything."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from a2c.config import Config
from a2c.files import write_synced
from a2c.games import WorkerError

FORMAT = 4
PREVIOUS = "previous.pt"  # the checkpoint before latest.pt
ARRAY, SCALAR = "numpy array", "numpy scalar"  # keys that stand for a value
REQUIRED = (
    *("format", "config", "input_shape", "n_actions", "network", "optimizer"),
    *("collector", "windows", "learning", "scores", "saved_best", "env_steps", "updates", "seconds"),
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says which, why and what to do."""


def save_checkpoint(path: Path, state: dict[str, Any], keep_previous: bool = False) -> None:
    """Write `state` to `path`, atomically; `keep_previous`: the file that was there becomes previous.pt.

    OSError where the disk refuses; what was there is untouched then.
    """
    content = io.BytesIO()
    torch.save(to_tensors({"format": FORMAT, **state}), content)
    temporary = path.with_name(path.name + ".tmp")
    write_synced(temporary, content.getbuffer())
    if keep_previous and path.exists():
        second = path.with_name(PREVIOUS + ".tmp")
        second.unlink(missing_ok=True)
        try:
            os.link(path, second)  # a second name, so that `path` itself is never missing
        except OSError:  # a filesystem without hard links
            shutil.copyfile(path, second)
        os.replace(second, path.with_name(PREVIOUS))
    os.replace(temporary, path)


def load_checkpoint(path: Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a checkpoint with `weights_only=True`.

    Raises CheckpointError, in one line, for a file that is missing, damaged, foreign or newer.
    """
    if not path.is_file():
        raise CheckpointError(f"checkpoint must be a file, got {path}; is this the directory of a run?")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a damaged pickle can raise almost anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"checkpoint {path} is damaged or not a checkpoint ({reason[:120]}){_advice(path)}"
        ) from error
    missing = [key for key in REQUIRED if not isinstance(state, dict) or key not in state]
    if missing:
        raise CheckpointError(f"checkpoint {path} is not one of a2c's: it has no {', '.join(missing)}{_advice(path)}")
    version = state["format"]
    if not isinstance(version, int) or version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        advice = "update a2c" if newer else "use the version of a2c that wrote it"
        raise CheckpointError(f"checkpoint {path} has format {version!r}, this a2c reads {FORMAT}: {advice}")
    for name in ("env_steps", "updates"):
        if type(state[name]) is not int or not 0 <= state[name] < 2**53:
            raise CheckpointError(f"checkpoint {path} holds a bad {name}, {state[name]!r:.60}{_advice(path)}")
    with loading(path):
        return to_arrays(state)


def to_tensors(value: Any) -> Any:
    """Nested plain values as a checkpoint may hold them: arrays become tensors, tuples stay, the rest is kept."""
    if isinstance(value, np.ndarray):
        return {ARRAY: torch.from_numpy(np.array(value))}
    if isinstance(value, np.generic):
        return {SCALAR: torch.from_numpy(np.array(value))}
    if isinstance(value, dict):
        return {key: to_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_tensors(item) for item in value)
    return value


def to_arrays(value: Any) -> Any:
    """What `to_tensors` was given."""
    if isinstance(value, dict):
        if set(value) == {ARRAY}:
            return value[ARRAY].cpu().numpy()
        if set(value) == {SCALAR}:
            return value[SCALAR].cpu().numpy()[()]
        return {key: to_arrays(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_arrays(item) for item in value)
    return value


def load_network(net: torch.nn.Module, state: dict[str, Any], path: Path) -> None:
    """Load the checkpoint's parameters; CheckpointError when they belong to another network."""
    try:
        net.load_state_dict(state["network"])
    except (AttributeError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {path} belongs to another network: keep network, frame_size, normalize_obs and env of its run"
        ) from error


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """Whatever a state of the right kind but with wrong content raises becomes a CheckpointError."""
    try:
        yield
    except (CheckpointError, WorkerError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise CheckpointError(f"checkpoint {path} holds a damaged state ({reason}){_advice(path)}") from error


def _advice(path: Path) -> str:
    previous = path.with_name(PREVIOUS)
    if path == previous or not previous.exists():
        return ""
    return f"; rename {previous} to {path.name} to go on from the one before"


def check_belongs(state: dict[str, Any], config: Config, path: Path) -> None:
    """CheckpointError when the run that goes on is of another kind than the checkpoint's."""
    try:
        saved = Config.from_json(state["config"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} holds a bad config: {error}") from error
    for name in ("env", "algorithm", "optimizer"):
        was, now = getattr(saved, name), getattr(config, name)
        if was != now:
            raise CheckpointError(f"checkpoint {path} is of {was}, got {name} {now}: leave {name} as it was")

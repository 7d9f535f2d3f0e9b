"""Checkpoints: written atomically, loaded without executing code from the file."""

from __future__ import annotations

import io
import os
import pickletools
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from a2c import __version__
from a2c.config.config import Config
from a2c.custom_network import check_network, make_apart
from a2c.envs.single import CUSTOM_NAMESPACE, Spaces
from a2c.metrics.files import TEMPORARY, write_atomically
from a2c.networks import NetworkFn, make_network
from a2c.processes.errors import RankError, WorkerError, with_notes_of
from a2c.run.values import to_arrays, to_tensors

FORMAT = 7
FIRST_VERSION = "0.1.0"  # of a2c, which wrote the formats 1 to 4, without its version
LATEST, PREVIOUS = "latest.pt", "previous.pt"  # the last checkpoint and the one before it
BEST = "best.pt"  # the checkpoint with the highest mean score of the 100 episodes before it
# What the pickle of a checkpoint may name. Torch allows more, such as a bytearray, which can take any amount of memory.
NAMES = re.compile(
    r"collections OrderedDict|torch \w+Storage|torch\.storage UntypedStorage|torch uint\d+|"
    r"torch\._utils _rebuild_tensor_v[23]"
)
POLICY = ("format", "version", "config", "input_shape", "n_actions", "network", "env_steps")  # what a policy file holds
REQUIRED = (*POLICY, "optimizer", "metrics", "algorithm", "scores", "saved_best", "updates", "seconds")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, the reason and what to do."""


def save_checkpoint(path: Path, state: dict[str, Any], keep_previous: bool = False) -> None:
    """Write `state` to `path` atomically, with format and version; `keep_previous`: rename the old file to previous.pt.

    Raises OSError if the disk refuses, and then leaves the old file untouched.
    """
    content = io.BytesIO()
    torch.save(to_tensors({"format": FORMAT, "version": __version__, **state}), content)
    second = path.with_name(PREVIOUS + TEMPORARY)
    if keep_previous := keep_previous and path.exists():
        second.unlink(missing_ok=True)
        try:
            os.link(path, second)  # a second name, so that there is a file at `path` all the time
        except OSError:  # a filesystem without hard links
            write_atomically(second, path.read_bytes())
    write_atomically(path, content.getbuffer())
    if keep_previous:
        os.replace(second, path.with_name(PREVIOUS))
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Let the files' new names in `path` survive a power failure."""
    with suppress(OSError):  # some file systems cannot sync a directory
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint with `weights_only=True`, in no more memory than a few times the size of the file.

    A policy file, too (see `a2c.run.policies`), whose float16 parameters become float32.
    Raises CheckpointError for a file that is missing, damaged, not of a2c or of another format.
    """
    if not path.is_file():
        why = "the directory has no such file" if path.parent.is_dir() else "there is no such directory"
        raise CheckpointError(f"checkpoint must be a file, got {path}: {why}")
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"checkpoint {path} cannot be read: permission denied")
    try:
        _check_archive(path)
        # Mapped, no storage can reach beyond the file, whatever size the pickle gives it.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _check_extent(state, path.stat().st_size)
    except Exception as error:  # a damaged pickle can raise almost anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"checkpoint {path} is damaged or not a checkpoint ({reason[:120]}){_advice(path)}"
        ) from error
    _check_format(state, path)
    for name, kinds in {"env_steps": (int,), "updates": (int,), "rewards": (int, float)}.items():
        if name in state and (type(state[name]) not in kinds or not 0 <= state[name] < 2**53):
            raise CheckpointError(f"checkpoint {path} holds a bad {name}, {state[name]!r:.60}{_advice(path)}")
    for name in ("network", "optimizer", "metrics", "algorithm", "scores"):
        if not isinstance(state.get(name, {}), dict):  # a tensor takes names of entries for an index, and warns
            kind = type(state[name]).__name__
            raise CheckpointError(f"checkpoint {path} holds a bad {name}, not a dictionary but {kind}{_advice(path)}")
    with raising_checkpoint_error(path):
        loaded: dict[str, Any] = to_arrays(state)
        if is_policy(loaded):
            network = loaded["network"].items()
            loaded["network"] = {k: v.float() if v.dtype == torch.float16 else v for k, v in network}
    return loaded


def is_policy(state: dict[str, Any]) -> bool:
    """True for the content of a policy file, which lacks what a resumed run needs."""
    return set(state) <= set(POLICY)


def _check_format(state: Any, path: Path) -> None:
    """CheckpointError if `state` is not one of a2c's, of another format, or lacks an entry."""
    number = state.get("format") if isinstance(state, dict) else None
    if type(number) is not int or not 0 < number < 1000:
        raise CheckpointError(f"checkpoint {path} is not one of a2c's: it has no format{_advice(path)}")
    if number != FORMAT:
        writer = " ".join(str(state.get("version", FIRST_VERSION)).split())[:40]
        advice = "update a2c" if number > FORMAT else f"install a2c {writer} to continue this run, or start a new one"
        raise CheckpointError(
            f"checkpoint {path} was written by a2c {writer} in format {number}, a2c {__version__} reads format "
            f"{FORMAT}: {advice}"
        )
    if missing := [key for key in (POLICY if is_policy(state) else REQUIRED) if key not in state]:
        raise CheckpointError(f"checkpoint {path} is not one of a2c's: it has no {', '.join(missing)}{_advice(path)}")


def _check_archive(path: Path) -> None:
    """ValueError if an entry of the zip archive is damaged, compressed (it may expand to any size) or forbidden."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("its entries are larger than the file")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"the checksum of its entry {damaged} is wrong")
        for entry in entries:
            if entry.filename.lower().endswith("data.pkl"):  # torch finds names in either case
                for opcode, name, _ in pickletools.genops(archive.read(entry)):
                    if opcode.name == "GLOBAL" and not NAMES.fullmatch(str(name)):
                        raise ValueError(f"it must hold numbers, strings and tensors only, got {name}")


def _check_extent(state: Any, size: int) -> None:
    """ValueError if nested values need more than `size` bytes, or if a tensor is not dense on the CPU."""
    rest = [state]
    while rest:
        value = rest.pop()
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.device.type != "cpu":
                raise ValueError("it holds a tensor that is not dense on the CPU")
            size -= value.numel() * value.element_size()
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        size -= len(items)
        if size < 0:
            raise ValueError("its content is larger than the file")
        rest += items


def make_checked(
    state: dict[str, Any], config: Config, spaces: Spaces, path: Path, network: NetworkFn | None = None
) -> torch.nn.Module:
    """The network of `config` to load the parameters of the checkpoint `state` into, after checking that they fit.

    CheckpointError if observations, actions or layers differ, or a weight is NaN or infinite.
    """
    for name, now in (("input_shape", list(spaces.obs_shape)), ("n_actions", spaces.n_actions)):
        if state[name] != now:
            raise CheckpointError(
                f"checkpoint {path} has {name} {str(state[name])[:80]}, {config.env} has {now}: keep env, frame_size "
                "and frame_stack of its run"
            )
    try:
        net = _empty_network(config, spaces, network)
    except Exception as error:  # of what somebody else has written
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"checkpoint {path} needs the network of its run: {reason}") from error
    kinds = {name: (value.shape, value.dtype) for name, value in net.state_dict().items()}
    if kinds != {name: (value.shape, value.dtype) for name, value in state["network"].items()}:
        raise CheckpointError(
            f"checkpoint {path} belongs to another network: keep network, frame_size, normalize_obs and env of its run"
        )
    for name, value in state["network"].items():
        if not value.isfinite().all():
            raise CheckpointError(f"checkpoint {path} holds a network whose {name} is NaN or infinite{_advice(path)}")
    return net


def _empty_network(config: Config, spaces: Spaces, custom: NetworkFn | None = None) -> torch.nn.Module:
    """The network of `config` to load parameters into: on the device `meta`, without memory; of `custom`, on the CPU.

    Raises ValueError if `custom` is missing, not wanted, or makes nothing that can be used, and whatever it raises.
    """
    if custom and config.network != "custom":
        raise ValueError(f"it is the built-in network {config.network}: leave out the argument network")
    with torch.device("cpu" if custom else "meta"), torch.random.fork_rng(devices=[]):  # the caller's stays
        make = partial(make_network, config, spaces.obs_shape, spaces.n_actions, spaces.stacked, custom)
        if not custom:
            return make()
        net = make_apart(make)
        check_network(net, spaces)
    return net


def load_run(path: Path, config: Config, spaces: Spaces, network: NetworkFn | None = None) -> dict[str, Any]:
    """`load_checkpoint` to resume a run; CheckpointError for a policy file, or another env, algorithm or network."""
    state = load_checkpoint(path)
    if is_policy(state):
        raise CheckpointError(f"checkpoint {path} holds a policy only: it can be evaluated and recorded, not resumed")
    with raising_checkpoint_error(path):
        check_belongs(state, config, path)
        make_checked(state, config, spaces, path, network)
    return state


@contextmanager
def raising_checkpoint_error(path: Path) -> Iterator[None]:
    """Turn what wrong content of a checkpoint raises inside into a CheckpointError."""
    try:
        yield
    except (CheckpointError, RankError, WorkerError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:160] + ")" + _advice(path)
        raise with_notes_of(error, CheckpointError(f"checkpoint {path} holds a damaged state ({why}")) from error


def _advice(path: Path) -> str:
    if path.name == LATEST and (previous := path.with_name(PREVIOUS)).exists():
        return f"; rename {previous} to {LATEST} to continue from the one before"
    if path.name == BEST and path.with_name(LATEST).exists():
        return f"; the last checkpoint of the run is {LATEST}"
    return ""


def check_belongs(state: dict[str, Any], config: Config, path: Path) -> None:
    """CheckpointError if the checkpoint's run had another env, algorithm or optimizer."""
    try:
        saved = Config.from_json(state["config"])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} holds a bad config: {error}") from error
    for name in ("env", "algorithm", "optimizer"):
        was, now = getattr(saved, name), getattr(config, name)
        own = name == "env" and was.startswith(CUSTOM_NAMESPACE) and now.startswith(CUSTOM_NAMESPACE)
        if was != now and not own:  # the name of a function may change
            raise CheckpointError(f"checkpoint {path} is of {name} {was}, got {now}: leave {name} as it was")

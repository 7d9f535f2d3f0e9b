"""One environment: its registered spec, how it is made, its spaces."""

from __future__ import annotations

import multiprocessing
import re
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import cv2
import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import FlattenObservation, ReshapeObservation, TransformObservation

from a2c.config.config import Config
from a2c.config.resolve import LEAST_IMAGE
from a2c.config.validation import nearest
from a2c.envs.atari import FRAME_SKIP, AtariGame
from a2c.envs.snapshot import SnapshotWrapper
from a2c.processes.start import WORKER_NAME, prepare_worker

EnvFn = Callable[..., gym.Env]  # makes an environment; is called with render_mode where a video is recorded
CUSTOM_NAMESPACE = "custom/"  # begins the ids of `register_env`
ATARI_SUFFIX = "NoFrameskip-v4"  # of the ids that leave frame skip to the wrappers, without sticky actions


def full_id(env_id: str) -> str:
    """The Gymnasium id that a short name stands for, such as `pong` or `space-invaders`; any other text as it is."""
    return env_id if env_id in gym.registry else short_names().get(_plain(env_id), env_id)


def short_names() -> dict[str, str]:
    """Ids by short name: Atari games without frame skip and sticky actions, the newest version of each environment, and
    as `ALE/...-v5` the games that have no other id. The first one counts.
    """
    newest = sorted(gym.registry.values(), key=lambda spec: -(spec.version or 0))
    atari = [spec for spec in newest if is_atari(spec)]
    names: dict[str, str] = {}
    for spec in (one for one in atari if one.id.endswith(ATARI_SUFFIX)):
        names.setdefault(_plain(spec.id.removesuffix(ATARI_SUFFIX)), spec.id)
    for spec in (one for one in newest if one.namespace is None and not is_atari(one)):
        names.setdefault(_plain(spec.name), spec.id)
    for spec in (one for one in atari if one.namespace == "ALE"):
        names.setdefault(_plain(spec.name), spec.id)
    return names


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def find_spec(env_id: str) -> EnvSpec:
    """The registered spec of `env_id`, or of what `full_id` makes of it; ValueError if there is none."""
    try:
        return gym.spec(full_id(env_id))
    except gym.error.Error as error:
        known = short_names() if re.fullmatch("[A-Za-z _-]+", env_id) else gym.registry
        hint = nearest(env_id, tuple(known))
        if env_id.startswith(CUSTOM_NAMESPACE):
            hint = "it was made by env_fn, which must be given again, in Python"
        elif ":" in env_id:
            hint = "module:id is not supported: import the module in a program that uses a2c.Trainer"
        raise ValueError(f"env must be a registered Gymnasium id, got {env_id!r}; {hint}") from error


def register_env(env_fn: EnvFn) -> str:
    """Register what `env_fn()` makes under the id `custom/NAME-v0`, NAME being that of `env_fn`, and return this id.

    It replaces another of the same name. ValueError for an environment in place of a function.
    """
    if not callable(env_fn):
        raise ValueError(f"env_fn must be a function that makes an environment, got {env_fn}")
    name = re.sub(r"\W", "", getattr(env_fn, "__name__", "")) or "env_fn"
    env_id = f"{CUSTOM_NAMESPACE}{name}-v0"
    gym.registry.pop(env_id, None)  # one of the same name, in a notebook for instance; gymnasium would warn
    gym.register(env_id, entry_point=env_fn)
    return env_id


def is_atari(spec: EnvSpec) -> bool:
    """Whether ale-py runs the environment."""
    return str(spec.entry_point).startswith("ale_py")


def make_env(config: Config, spec: EnvSpec, seed: int, render_mode: str | None = None) -> gym.Env:
    """One environment, with preprocessing if it is an Atari game; `render_mode` as in gymnasium.

    4 frames per step replace the frame skip registered for the id; its sticky actions are kept unless `config` sets
    them. ValueError for an id that cannot be made here, or whose actions are not discrete.
    """
    if multiprocessing.current_process().name.startswith(f"Worker<{WORKER_NAME}"):
        prepare_worker()
        cv2.setNumThreads(1)
    if not is_atari(spec):
        return _make_other(spec, render_mode)
    return AtariGame(config, spec, seed, render_mode)


def _make_other(spec: EnvSpec, render_mode: str | None) -> gym.Env:
    """An environment other than an Atari game, as registered; observations that are not a Box are flattened."""
    try:
        # Many constructors have no parameter render_mode.
        rendering: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
        env = gym.make(spec, disable_env_checker=True, **rendering)
    except (gym.error.Error, ImportError, AttributeError, TypeError) as error:  # a module that is missing or too old
        if spec.id.startswith(CUSTOM_NAMESPACE):
            renders = render_mode is not None and "render_mode" in str(error)
            rule = "accept the argument render_mode to be rendered" if renders else "make an environment"
            raise ValueError(f"env_fn must {rule}, got {type(error).__name__}: {error}") from error
        raise ValueError(f"env must be an id that can be made here, got {spec.id!r}: {error}") from error
    if not isinstance(env.action_space, gym.spaces.Discrete):
        env.close()
        raise ValueError(f"env must have a discrete action space, got {env.action_space} of {spec.id}")
    space = env.observation_space
    if not space.is_np_flattenable:
        env.close()
        raise ValueError(f"env must have observations of a fixed size, got {space} of {spec.id}")
    if not isinstance(space, gym.spaces.Box):
        return FlattenObservation(env)
    if len(space.shape) == 2 and space.dtype == np.uint8 and min(space.shape) >= LEAST_IMAGE:  # [H, W] -> [1, H, W]
        return ReshapeObservation(env, (1, *space.shape))
    if len(space.shape) == 3 and space.dtype == np.uint8 and space.shape[2] in (1, 3, 4):  # [H, W, C] -> [C, H, W]
        low, high = space.low.transpose(2, 0, 1), space.high.transpose(2, 0, 1)
        return TransformObservation(env, _channels_first, gym.spaces.Box(low, high, dtype=np.uint8))
    return env


def _channels_first(obs: np.ndarray) -> np.ndarray:
    return obs.transpose(2, 0, 1)


def checked_spec(config: Config) -> EnvSpec:
    """The spec of `config.env`; ValueError if there is none, or if it does not support what `config` asks for."""
    spec = find_spec(config.env)
    if is_atari(spec):
        changed = [name for name in ("mode", "difficulty") if spec.kwargs.get(name) is not None]
        if changed and config.backend == "native":
            raise ValueError(f"backend must be async or sync for {spec.id}, which sets {changed[0]}, got native")
        if spec.kwargs.get("continuous"):
            raise ValueError(f"env must have a discrete action space, got the continuous one of {spec.id}")
    else:
        if config.backend == "native":
            raise ValueError(f"backend must be async or sync for {spec.id}: native runs Atari games only, got native")
        if config.terminal_on_life_loss:
            raise ValueError(f"terminal_on_life_loss must be off for {spec.id}, which has no lives, got True")
    return spec


class Spaces(NamedTuple):
    """What a network needs to know of an environment."""

    obs_shape: tuple[int, ...]  # of one observation
    n_actions: int
    obs_dtype: np.dtype
    stacked: bool  # the channels of an observation are successive frames (Atari), not colours
    first_action: int = 0  # number of the first action (`Discrete.start`)

    @property
    def frames_per_step(self) -> int:
        """Frames of the emulator per decision."""
        return FRAME_SKIP if self.stacked else 1


def probe_spaces(config: Config) -> Spaces:
    """The spaces of `config.env`, from one environment of this process.

    Raises ValueError as `make_envs` does, and starts no process.
    """
    spec = checked_spec(config)
    env = make_env(config, spec, config.seed)
    space, actions = env.observation_space, env.action_space
    env.close()
    assert isinstance(space, gym.spaces.Box) and isinstance(actions, gym.spaces.Discrete)  # as `make_env` checks
    return Spaces(space.shape, int(actions.n), space.dtype, is_atari(spec), int(actions.start))


def make_snapshot_env(config: Config, spec: EnvSpec, seed: int) -> SnapshotWrapper:
    """`make_env` in a `SnapshotWrapper`: a row of the `async` and `sync` backends.

    ValueError as there; any other exception becomes a RuntimeError, as in `SnapshotWrapper`.
    """
    try:
        return SnapshotWrapper(make_env(config, spec, seed))
    except ValueError:
        raise
    except Exception:  # an EOFError or ConnectionError would look like the death of a process
        raise RuntimeError(traceback.format_exc()) from None

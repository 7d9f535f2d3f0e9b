"""Vector environments: three backends behind one contract. No torch may enter this room.

The contract of `make_envs(config)`, whatever the backend:

========== ======================= ==========================================================
name       shape, dtype            meaning
========== ======================= ==========================================================
obs        [N, 4, S, S] uint8      newest frame last; frames before a game's start are zeros
                                   (other ids: the environment's own observation)
rewards    [N] float32             raw game points of this decision
terminated [N] bool                the episode ended by the game's rules (or by a lost life)
truncated  [N] bool                the game was cut off at `max_episode_frames`
info       "final_obs"             {row: true last observation} of exactly the rows that ended
info       "episodes"              list of `Episode`, one per *game* that ended in this step
========== ======================= ==========================================================

Autoreset is SAME_STEP: where an episode ended, `obs` already begins the next one, so no junk
transition exists. Preprocessing follows Machado et al. (2018), section 3: up to `noop_max`
no-ops, one FIRE where the game has that button, 4 frames per decision, maximum over the last
two, grey, area-scaled. A lost life ends an episode for the learner and never resets the game.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import ale_py
import cv2
import gymnasium as gym
import numpy as np
from ale_py.env import AtariEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from a2c.config import FRAME_SKIP, FRAME_STACK, Config, nearest

gym.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


class Episode(NamedTuple):
    """One finished game: its environment, true score (game points) and length (decisions)."""

    env: int
    score: float
    length: int


def make_envs(config: Config) -> GameEnvs:
    """Start `config.num_envs` environments; `reset()` seeds row i with `config.seed + i`.

    Raises ValueError, before any process starts, for an unknown id (with the nearest names), an
    action space that is not discrete, or a backend that cannot play the id.
    """
    spec = find_spec(config.env)
    if config.backend == "native":
        return GameEnvs(_native(config, spec), config)
    envs = [partial(make_env, config, spec, config.seed + i) for i in range(config.num_envs)]
    if config.backend == "sync":
        return GameEnvs(SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP), config)
    with _workers_without_main():
        vector = AsyncVectorEnv(
            envs,
            autoreset_mode=AutoresetMode.SAME_STEP,
            copy=False,
            context=_worker_context(),
            max_concurrency=_concurrency(config),
        )
    return GameEnvs(vector, config)


def split_envs(config: Config, groups: int, threads: int = 1) -> list[Config]:
    """One config per group of environments: shared out in order, with the seeds of the whole.

    `threads` is the number of emulator threads (native) or busy workers (async) in each group.
    """
    sizes = [len(part) for part in np.array_split(np.arange(config.num_envs), groups)]
    starts = np.cumsum([0, *sizes[:-1]])
    return [
        replace(config, num_envs=n, seed=config.seed + int(start), threads=threads)
        for n, start in zip(sizes, starts, strict=True)
    ]


def find_spec(env_id: str) -> gym.envs.registration.EnvSpec:
    """The registered spec of `env_id`; ValueError with the nearest names when there is none."""
    try:
        return gym.spec(env_id)
    except (gym.error.Error, ModuleNotFoundError) as error:
        known = tuple(gym.registry)
        raise ValueError(f"env must be a registered Gymnasium id, got {env_id!r}; {nearest(env_id, known)}") from error


def is_atari(spec: gym.envs.registration.EnvSpec) -> bool:
    """True where ale-py runs the environment."""
    return str(spec.entry_point).startswith("ale_py")


def make_env(config: Config, spec: gym.envs.registration.EnvSpec, seed: int) -> gym.Env:
    """One preprocessed environment: what each row of the `async` and `sync` backends runs."""
    _settle_in_worker()
    if not is_atari(spec):
        env = gym.make(spec, disable_env_checker=True)
        if not isinstance(env.action_space, gym.spaces.Discrete):
            raise ValueError(f"env must have a discrete action space, got {env.action_space} of {spec.id}")
        return env
    # obs_type="ram" keeps AtariEnv from rendering an RGB screen on every emulator frame.
    kwargs = dict(spec.kwargs, frameskip=1, obs_type="ram", max_num_frames_per_episode=config.max_episode_frames)
    env = SeededAtariEnv(seed, **kwargs | {"repeat_action_probability": _sticky(config, spec)})
    env = AtariPreprocessing(env, noop_max=config.noop_max, frame_skip=FRAME_SKIP, screen_size=config.frame_size)
    env.obs_buffer = [np.zeros(env.ale.getScreenDims(), np.uint8) for _ in range(2)]
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = FireReset(env)
    return FrameStackObservation(env, FRAME_STACK, padding_type="zero")


class SeededAtariEnv(AtariEnv):
    """AtariEnv that loads its ROM (0.1 s) once and not again at the first `reset(seed)`."""

    def __init__(self, seed: int, **kwargs: Any) -> None:
        self._fresh_seed: int | None = seed
        super().__init__(**kwargs)

    def seed_game(self, seed: int | None = None) -> tuple[int, int]:
        return super().seed_game(self._fresh_seed if seed is None else seed)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, Any]:
        already_seeded, self._fresh_seed = seed == self._fresh_seed, None
        return super().reset(seed=None if already_seeded else seed, options=options)


class FireReset(gym.Wrapper):
    """Press FIRE for one frame after the no-ops, as ale-py's vector environment does."""

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        _, info = self.env.reset(**kwargs)
        preprocessing = self.env
        preprocessing.ale.act(ale_py.Action.FIRE)
        preprocessing.ale.getScreenGrayscale(preprocessing.obs_buffer[0])
        preprocessing.obs_buffer[1].fill(0)
        preprocessing.lives = preprocessing.ale.lives()
        return preprocessing._get_obs(), info


class GameEnvs(VectorWrapper):
    """Hide the backends' differences and count games from raw rewards (the contract above).

    Wraps any SAME_STEP gymnasium vector environment; ValueError for another autoreset mode.
    """

    def __init__(self, env: VectorEnv, config: Config | None = None) -> None:
        super().__init__(env)
        if env.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise ValueError(f"autoreset_mode must be SAME_STEP, got {env.metadata.get('autoreset_mode')}")
        if not isinstance(env.single_action_space, gym.spaces.Discrete):
            raise ValueError(f"env must have a discrete action space, got {env.single_action_space}")
        self.seed = config.seed if config else 0
        self.end_of_life = bool(config and config.end_of_life)
        self.scores = np.zeros(self.num_envs, np.float64)  # [N] points of the running game
        self.lengths = np.zeros(self.num_envs, np.int64)  # [N] decisions of the running game
        self.lives = np.zeros(self.num_envs, np.int64)  # [N] lives after the last decision

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Begin a new game in every row; `seed` defaults to the config's."""
        obs, info = self.env.reset(seed=self.seed if seed is None else seed, options=options)
        self.scores[:], self.lengths[:] = 0.0, 0
        self.lives = np.array(info.get("lives", self.lives))
        return obs, {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Play one decision in every row. ValueError for a bad action: ale-py would hang on it."""
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or actions.dtype.kind != "i":
            raise ValueError(
                f"actions must be integers of shape ({self.num_envs},), got {actions.dtype} {actions.shape}"
            )
        n_actions = int(self.single_action_space.n)
        if actions.min() < 0 or actions.max() >= n_actions:
            raise ValueError(
                f"actions must be at least 0 and below {n_actions}, got {actions.min()} to {actions.max()}"
            )
        obs, raw_rewards, terminated, truncated, info = self.env.step(actions)
        rewards = np.asarray(raw_rewards, np.float32)
        game_over = terminated | truncated
        self.scores += rewards
        self.lengths += 1
        episodes = [Episode(int(i), float(self.scores[i]), int(self.lengths[i])) for i in np.flatnonzero(game_over)]
        self.scores[game_over], self.lengths[game_over] = 0.0, 0
        final_obs = {int(i): np.array(info["final_obs"][i]) for i in np.flatnonzero(game_over)}
        if self.end_of_life:
            lives = np.array(info["lives"])
            lost = (lives < self.lives) & ~game_over
            self.lives = lives
            terminated = terminated | lost
            final_obs |= {int(i): np.array(obs[i]) for i in np.flatnonzero(lost)}
        return obs, rewards, terminated, truncated, {"final_obs": final_obs, "episodes": episodes}


def _native(config: Config, spec: gym.envs.registration.EnvSpec) -> VectorEnv:
    if not is_atari(spec):
        raise ValueError(f"backend must be async or sync for {spec.id}: native plays Atari games only, got native")
    env = ale_py.vector_env.AtariVectorEnv(
        spec.kwargs["game"],
        config.num_envs,
        num_threads=min(config.threads or 1, config.num_envs),
        max_num_frames_per_episode=config.max_episode_frames,
        repeat_action_probability=_sticky(config, spec),
        autoreset_mode=AutoresetMode.SAME_STEP,
        img_height=config.frame_size,
        img_width=config.frame_size,
        stack_num=FRAME_STACK,
        frameskip=FRAME_SKIP,
        noop_max=config.noop_max,
        reward_clipping=False,
    )
    # The class shares one metadata dictionary between all instances.
    env.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
    return env


def _sticky(config: Config, spec: gym.envs.registration.EnvSpec) -> float:
    if config.sticky_actions is not None:
        return config.sticky_actions
    return float(spec.kwargs.get("repeat_action_probability", 0.25))


def _concurrency(config: Config) -> int:
    """Workers that may emulate at once: a few more than the cores only adds context switches."""
    return min(config.num_envs, (config.threads or 1) + 1)


def _worker_context() -> str:
    """forkserver where there is one: it imports this module once and never torch."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(["a2c.envs"])
    return "forkserver"


@contextlib.contextmanager
def _workers_without_main() -> Iterator[None]:
    """Keep workers from importing the caller's script, and with it torch, once per process."""
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def _settle_in_worker() -> None:
    """In a worker process: leave Ctrl-C to the parent and use one cv2 thread."""
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    cv2.setNumThreads(1)

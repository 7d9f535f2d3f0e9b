"""One environment: which id it is, and how an Atari game is preprocessed. No torch may enter this room.

This is all that a worker process of the `async` backend runs.
"""

from __future__ import annotations

import multiprocessing
import signal
from typing import Any

import ale_py
import cv2
import gymnasium as gym
import numpy as np
from ale_py.env import AtariEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import (
    AtariPreprocessing,
    FlattenObservation,
    FrameStackObservation,
    TimeLimit,
    TransformObservation,
)

from a2c.config import FRAME_SKIP, FRAME_STACK, Config, nearest

gym.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def find_spec(env_id: str) -> EnvSpec:
    """The registered spec of `env_id`; ValueError with the nearest names when there is none."""
    try:
        return gym.spec(env_id)
    except (gym.error.Error, ModuleNotFoundError) as error:
        known = tuple(gym.registry)
        raise ValueError(f"env must be a registered Gymnasium id, got {env_id!r}; {nearest(env_id, known)}") from error


def is_atari(spec: EnvSpec) -> bool:
    """True where ale-py runs the environment."""
    return str(spec.entry_point).startswith("ale_py")


def make_env(config: Config, spec: EnvSpec, seed: int) -> gym.Env:
    """One preprocessed environment.

    4 frames per decision replace the id's own frame skip; its sticky actions hold unless the
    config says otherwise.
    """
    if multiprocessing.current_process().name.startswith("Worker<AsyncVectorEnv>"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
        cv2.setNumThreads(1)
    if not is_atari(spec):
        return _make_other(spec)
    # obs_type="ram" keeps AtariEnv from rendering an RGB screen on every emulator frame. The emulator's own
    # limit would cut inside a decision, whose frames AtariPreprocessing then drops: TimeLimit cuts behind one.
    kwargs = dict(spec.kwargs, frameskip=1, obs_type="ram", max_num_frames_per_episode=None)
    env = SeededAtariEnv(seed, **kwargs | {"repeat_action_probability": sticky_probability(config, spec)})
    env = AtariPreprocessing(env, noop_max=config.noop_max, frame_skip=FRAME_SKIP, screen_size=config.frame_size)
    env.obs_buffer = [np.zeros(env.ale.getScreenDims(), np.uint8) for _ in range(2)]
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = FireReset(env)
    env = FrameStackObservation(env, FRAME_STACK, padding_type="zero")
    return TimeLimit(env, config.max_episode_frames // FRAME_SKIP)


def _make_other(spec: EnvSpec) -> gym.Env:
    """An environment that is no Atari game: as registered; observations that are no array become one vector."""
    try:
        env = gym.make(spec, disable_env_checker=True)
    except gym.error.Error as error:
        raise ValueError(f"env must be an id that can be made here, got {spec.id!r}: {error}") from error
    if not isinstance(env.action_space, gym.spaces.Discrete):
        raise ValueError(f"env must have a discrete action space, got {env.action_space} of {spec.id}")
    space = env.observation_space
    if not isinstance(space, gym.spaces.Box):
        return FlattenObservation(env)
    if len(space.shape) == 3 and space.dtype == np.uint8 and space.shape[2] in (1, 3, 4):  # [H, W, C] -> [C, H, W]
        low, high = space.low.transpose(2, 0, 1), space.high.transpose(2, 0, 1)
        return TransformObservation(env, _channels_first, gym.spaces.Box(low, high, dtype=np.uint8))
    return env


def _channels_first(obs: np.ndarray) -> np.ndarray:
    return obs.transpose(2, 0, 1)


def sticky_probability(config: Config, spec: EnvSpec) -> float:
    """Probability of a repeated action: the config's, else that of the id's own protocol."""
    if config.sticky_actions is not None:
        return config.sticky_actions
    return float(spec.kwargs.get("repeat_action_probability", 0.25))


class SeededAtariEnv(AtariEnv):
    """AtariEnv that loads its ROM (0.1 s) once and not again at the first `reset(seed)`."""

    def __init__(self, seed: int, **kwargs: Any) -> None:
        self._fresh_seed: int | None = seed
        self.last_action = 0  # what a sticky emulator may repeat; `cloneState` does not know it
        super().__init__(**kwargs)

    def seed_game(self, seed: int | None = None) -> tuple[int, int]:
        return super().seed_game(self._fresh_seed if seed is None else seed)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, Any]:
        already_seeded, self._fresh_seed = seed == self._fresh_seed, None
        self.last_action = 0
        return super().reset(seed=None if already_seeded else seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        self.last_action = int(action)
        return super().step(action)


class FireReset(gym.Wrapper):
    """Press FIRE for one frame after the no-ops, as ale-py's vector environment does."""

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        _, info = self.env.reset(**kwargs)
        preprocessing = self.env
        game = preprocessing.unwrapped
        game.step(game.get_action_meanings().index("FIRE"))
        preprocessing.ale.getScreenGrayscale(preprocessing.obs_buffer[0])
        preprocessing.obs_buffer[1].fill(0)
        preprocessing.lives = preprocessing.ale.lives()
        return preprocessing._get_obs(), info

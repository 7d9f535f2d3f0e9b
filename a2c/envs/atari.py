"""One Atari game and its preprocessing, as the `async` and `sync` backends run it."""

from __future__ import annotations

from typing import Any

import ale_py
import cv2
import gymnasium as gym
import numpy as np
from ale_py.env import AtariEnv
from gymnasium.envs.registration import EnvSpec

from a2c.config.config import Config
from a2c.envs.packing import pack, unpack, unpack_like

FRAME_SKIP = 4  # emulator frames per agent decision, on every backend
STATE_LIMIT = 2**20  # bytes of an emulator's state at most; about 15,000 are usual
CROP = slice(34, 194)  # rows of the screen with the playing field, as in OpenAI's universe-starter-agent

gym.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def sticky_probability(config: Config, spec: EnvSpec) -> float:
    """Probability that an action is repeated: the config's, else the one registered for the id."""
    if config.sticky_actions is not None:
        return config.sticky_actions
    return float(spec.kwargs.get("repeat_action_probability", 0.25))


class AtariGame(AtariEnv):
    """One Atari game as the agent sees it: 4 frames per step, the newest `frame_stack` frames as observation.

    Preprocessing (see `a2c.envs.make`) gives the same pixels as gymnasium's `AtariPreprocessing` and
    `FrameStackObservation`, whose layers of Python take a worker a fifth longer: they are cold in the cache whenever
    50 processes share a few cores.

    The observation `[frame_stack, S, S]` uint8 is one array that the next step overwrites; a reset makes a new one.

    Sticky actions are drawn here, by ale-py's rule: with probability `sticky`, an emulator frame repeats the last
    accepted action. The emulator's own sticky actions are off, because its saved states do not hold that action.
    """

    def __init__(self, config: Config, spec: EnvSpec, seed: int, render_mode: str | None = None) -> None:
        self._fresh_seed: int | None = seed
        # obs_type="ram" keeps AtariEnv from rendering an RGB screen. The emulator's own limit of frames
        # would truncate inside a step; `step` truncates after one.
        kwargs = dict(
            spec.kwargs, frameskip=1, obs_type="ram", max_num_frames_per_episode=None, render_mode=render_mode
        )
        super().__init__(**kwargs | {"repeat_action_probability": 0.0})
        self.config = config  # settings are not part of a snapshot: a resumed run may change them
        self.sticky = sticky_probability(config, spec)
        names = self.get_action_meanings()
        self.fire = names.index("FIRE") if "FIRE" in names else -1
        self.accepted = 0  # index of the action that a sticky frame repeats; an episode starts with the no-op
        self.decisions = 0  # steps of the running episode
        self.pooled, self.screen = np.zeros((2, *self.ale.getScreenDims()), np.uint8)
        self.frames = np.zeros((config.frame_stack, config.frame_size, config.frame_size), np.uint8)
        self.observation_space = gym.spaces.Box(0, 255, self.frames.shape, np.uint8)

    def seed_game(self, seed: int | None = None) -> tuple[int, int]:
        return super().seed_game(self._fresh_seed if seed is None else seed)

    def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode: up to `noop_max` no-ops, then FIRE where the game has that button."""
        # Loading the ROM takes 0.1 s: not again at the first reset, if it is with the seed it was loaded with.
        already_seeded, self._fresh_seed = seed == self._fresh_seed, None
        super().reset(seed=None if already_seeded else seed, options=options)
        self.accepted = 0
        most = self.config.noop_max
        for _ in range(self.np_random.integers(1, most + 1) if most else 0):
            self._emulate(0)
            if self.ale.game_over():
                self.ale.reset_game()
        if self.fire >= 0:
            self._emulate(self.fire)
        self.decisions = 0
        self.frames = np.zeros_like(self.frames)  # frames before the episode's start
        self.screen.fill(0)
        self.ale.getScreenGrayscale(self.pooled)
        return self._observe(), self._info()

    def step(  # type: ignore[override]
        self, action: Any
    ) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One step: the action for 4 frames or until the episode ends; the last two frames are pooled."""
        reward = self._emulate(action) + self._emulate(action) + self._emulate(action)
        terminated = self.ale.game_over()
        if not terminated:
            self.ale.getScreenGrayscale(self.screen)
            reward += self._emulate(action)
            terminated = self.ale.game_over()
            if not terminated:
                self.ale.getScreenGrayscale(self.pooled)
        self.decisions += 1
        truncated = self.decisions >= self.config.max_episode_frames // FRAME_SKIP
        return self._observe(), reward, terminated, truncated, self._info()

    def get_state(self) -> dict[str, Any]:
        """Everything that the rest of the episode depends on: plain values, and bytes as `pack` returns them.

        `screen` is left out: until it is overwritten, it is nowhere brighter than `pooled`.
        """
        return {
            "emulator": pack(self.ale.cloneState(include_rng=True).serialize()),
            "generator": self.np_random.bit_generator.state,
            "accepted": self.accepted,
            "decisions": self.decisions,
            "pooled": pack(self.pooled.tobytes()),
            "frames": pack(self.frames.tobytes()),
        }

    def set_state(self, state: dict[str, Any]) -> bool:
        """Restore what `get_state` returned; False if the emulator did not restore its state exactly.

        Raises ValueError, LookupError or TypeError for a damaged state.
        """
        for name, limit in (("accepted", len(self._action_set)), ("decisions", 2**31)):
            if type(state[name]) is not int or not 0 <= state[name] < limit:
                raise ValueError(f"{name} must be an integer, at least 0 and below {limit}, got {state[name]!r}")
        self.pooled = unpack_like(state["pooled"], self.pooled)
        self.frames = unpack_like(state["frames"], self.frames)
        self.accepted, self.decisions = state["accepted"], state["decisions"]
        self.np_random.bit_generator.state = state["generator"]
        self.screen.fill(0)
        emulator = unpack(state["emulator"], STATE_LIMIT)
        try:
            self.ale.restoreState(ale_py.ALEState(emulator))
        except (RuntimeError, SystemError) as error:  # what ale-py throws has no Python type
            raise ValueError("the emulator refused its state") from error
        return self.ale.cloneState(include_rng=True).serialize() == emulator

    def _emulate(self, action: Any) -> float:
        """The reward of one emulator frame with `action`, or the last accepted one; 0 once the episode has ended."""
        if self.ale.game_over():
            return 0.0
        if not self.sticky or self.np_random.random() >= self.sticky:
            self.accepted = int(action)
        return self.ale.act(self._action_set[self.accepted])

    def _observe(self) -> np.ndarray:
        """Pool and scale the last two frames, and push the result onto the stack."""
        np.maximum(self.pooled, self.screen, out=self.pooled)
        self.frames[:-1] = self.frames[1:]
        frame = self.pooled[CROP] if self.config.crop else self.pooled
        cv2.resize(frame, self.frames.shape[1:], self.frames[-1], interpolation=cv2.INTER_AREA)
        return self.frames

    def _info(self) -> dict[str, Any]:
        # A vector environment spends time on every info, so there is none that is not read.
        return {"lives": self.ale.lives()} if self.config.terminal_on_life_loss else {}

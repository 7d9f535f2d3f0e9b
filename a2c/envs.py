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
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.async_vector_env import AsyncState

from a2c.atari import find_spec, is_atari, make_env, sticky_probability
from a2c.config import FRAME_SKIP, FRAME_STACK, Config, available_cores


class Episode(NamedTuple):
    """One finished game: its environment, true score (game points) and length (decisions)."""

    env: int
    score: float
    length: int


class WorkerError(RuntimeError):
    """An environment failed, or the process that ran it died; its vector environment is of no more use."""


def make_envs(config: Config, seeds: Sequence[int] | None = None) -> GameEnvs:
    """Start `config.num_envs` environments; `reset()` seeds row i with `seeds[i]`.

    `seeds` are drawn from `config.seed` unless they are given. Raises ValueError, before any
    process starts, for an unknown id (with the nearest names), an action space that is not
    discrete, or a backend that cannot play the id.
    """
    spec = checked_spec(config)
    seeds = row_seeds(config) if seeds is None else list(seeds)
    if config.backend == "native":
        return GameEnvs(_native(config, spec), seeds, config.end_of_life)
    envs = [partial(make_env, config, spec, seed) for seed in seeds]
    if config.backend == "sync":
        vector = SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP)
        return GameEnvs(vector, seeds, config.end_of_life)
    with _workers_without_main():
        vector = AsyncVectorEnv(
            envs,
            autoreset_mode=AutoresetMode.SAME_STEP,
            copy=False,
            context=_worker_context(),
            max_concurrency=_concurrency(config),
        )
    return GameEnvs(vector, seeds, config.end_of_life)


def checked_spec(config: Config) -> EnvSpec:
    """The spec of `config.env`; ValueError where there is none or the config asks what it cannot do."""
    spec = find_spec(config.env)
    if not is_atari(spec):
        if config.backend == "native":
            raise ValueError(f"backend must be async or sync for {spec.id}: native plays Atari games only, got native")
        if config.end_of_life:
            raise ValueError(f"end_of_life must be off for {spec.id}, which has no lives, got True")
    return spec


def probe_spaces(config: Config) -> tuple[tuple[int, ...], int]:
    """Observation shape and number of actions of `config.env`, read off one environment.

    Raises what `make_envs` would raise, and starts no process.
    """
    spec = checked_spec(config)
    env = make_env(config, spec, config.seed)
    shape, actions = env.observation_space.shape, int(env.action_space.n)
    env.close()
    return shape, actions


def make_groups(config: Config, groups: int, threads: int = 1, env_steps: int = 0) -> list[GameEnvs]:
    """The environments of a run in `groups` of almost equal size, in order.

    `threads` is the number of emulator threads (native) or busy workers (async) of each group;
    `env_steps`, the age of a resumed run, keeps it from playing its first games again.
    """
    made: list[GameEnvs] = []
    try:
        for seeds in np.array_split(row_seeds(config, env_steps), groups):
            made.append(make_envs(replace(config, num_envs=len(seeds), threads=threads), seeds.tolist()))
    except BaseException:
        for envs in made:
            envs.close()
        raise
    return made


def row_seeds(config: Config, env_steps: int = 0) -> list[int]:
    """A seed per environment, far from those of neighbouring run seeds (numpy's SeedSequence)."""
    return (np.random.SeedSequence((config.seed, env_steps)).generate_state(config.num_envs) >> 1).tolist()


class GameEnvs(VectorWrapper):
    """Hide the backends' differences and count games from raw rewards (the contract above).

    Wraps any SAME_STEP gymnasium vector environment; ValueError for another autoreset mode.
    """

    def __init__(self, env: VectorEnv, seeds: Sequence[int] | None = None, end_of_life: bool = False) -> None:
        super().__init__(env)
        if env.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise ValueError(f"autoreset_mode must be SAME_STEP, got {env.metadata.get('autoreset_mode')}")
        if not isinstance(env.single_action_space, gym.spaces.Discrete):
            raise ValueError(f"env must have a discrete action space, got {env.single_action_space}")
        self.seeds = list(range(self.num_envs)) if seeds is None else list(seeds)
        self.end_of_life = end_of_life
        self.broken = False  # an environment failed: nothing more may be asked of the others
        self.scores = np.zeros(self.num_envs, np.float64)  # [N] points of the running game
        self.lengths = np.zeros(self.num_envs, np.int64)  # [N] decisions of the running game
        self.lives = np.zeros(self.num_envs, np.int64)  # [N] lives after the last decision

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Begin a new game in every row; `seed` (one number, or one per row) defaults to the rows' own."""
        seed = self.seeds if seed is None else seed
        if isinstance(self.env, AtariVectorEnv) and isinstance(seed, list):
            seed = np.array(seed)
        obs, info = self.env.reset(seed=seed, options=options)
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
        try:
            obs, raw_rewards, terminated, truncated, info = self.env.step(actions + self.single_action_space.start)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self.broken = True
            raise WorkerError("the process of an environment died (killed, or out of memory)") from error
        except Exception as error:
            self.broken = True
            raise WorkerError(f"an environment failed: {type(error).__name__}: {error}") from error
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

    def close(self, **kwargs: Any) -> None:
        """End the environments; worker processes that cannot be asked any more are killed."""
        vector = self.env
        if not isinstance(vector, AsyncVectorEnv) or not (self.broken or vector._state != AsyncState.DEFAULT):
            return vector.close(**kwargs)
        for process in vector.processes:
            process.kill()
        for process in vector.processes:
            process.join()
        for pipe in filter(None, vector.parent_pipes):
            pipe.close()
        vector.closed = True


def _native(config: Config, spec: EnvSpec) -> VectorEnv:
    env = AtariVectorEnv(
        spec.kwargs["game"],
        config.num_envs,
        num_threads=min(config.threads or available_cores(), config.num_envs),
        max_num_frames_per_episode=config.max_episode_frames // FRAME_SKIP * FRAME_SKIP,
        repeat_action_probability=sticky_probability(config, spec),
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


def _concurrency(config: Config) -> int:
    """Workers that may emulate at once: a few more than the cores only adds context switches."""
    return min(config.num_envs, (config.threads or available_cores()) + 1)


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

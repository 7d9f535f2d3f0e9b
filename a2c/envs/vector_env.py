"""The vector environment that the rest of the package uses. Its contract is the docstring of `a2c.envs`."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.async_vector_env import AsyncState

from a2c.processes.errors import WorkerError, worker_error
from a2c.processes.start import end_processes
from a2c.processes.watchdog import Watchdog

# gymnasium repeats a worker's traceback as warnings; the WorkerError that follows has it.
warnings.filterwarnings("ignore", message=r"\x1b\[[\d;]*mERROR: ")


class Episode(NamedTuple):
    """A finished episode: its environment, its unclipped score (points) and its length (steps)."""

    env: int  # row of the environment; with a3c among those of a worker, with ga3c among those of the joined rollouts
    score: float
    length: int
    t: int = 0  # step of the rollout in which it ended


def in_order(episodes: Iterable[Episode]) -> list[Episode]:
    """The episodes of a rollout in the order in which they ended."""
    return sorted(episodes, key=lambda episode: (episode.t, episode.env))


class MonitoredVectorEnv(VectorWrapper):
    """Gives every backend the same interface, that of `a2c.envs`, and measures episodes by their raw rewards.

    Wraps any gymnasium vector environment in SAME_STEP autoreset mode; ValueError for another mode, or for actions
    that are not discrete. The environments must not write to a final observation later; `SnapshotWrapper` copies it.
    Row i is reset with `seeds[i]` (default: i). Whatever an environment raises becomes a WorkerError, and so does a
    worker process that does not respond within `timeout` seconds.
    """

    def __init__(
        self,
        env: VectorEnv,
        seeds: Sequence[int] | None = None,
        terminal_on_life_loss: bool = False,
        timeout: float = 60.0,
        stacked: bool = False,
    ) -> None:
        """`stacked`: each observation is the stack of frames before it without the oldest, plus a new frame, except
        where an episode begins.
        """
        super().__init__(env)
        if env.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise ValueError(f"autoreset_mode must be SAME_STEP, got {env.metadata.get('autoreset_mode')}")
        space = env.single_action_space
        if not isinstance(space, gym.spaces.Discrete):
            raise ValueError(f"env must have a discrete action space, got {env.single_action_space}")
        self.n_actions, self.first_action = int(space.n), int(space.start)
        self.seeds = list(range(self.num_envs)) if seeds is None else list(seeds)
        self.terminal_on_life_loss, self.stacked = terminal_on_life_loss, stacked
        self.watchdog: Watchdog | None = None
        if isinstance(env, AsyncVectorEnv):
            processes = env.processes  # not `env`: its workers end when nobody holds it any more
            self.watchdog = Watchdog(timeout, lambda: processes)
            weakref.finalize(self, _end, self.watchdog, processes).atexit = False
        self.broken = False  # an environment failed: the others must not be used any more
        self.scores = np.zeros(self.num_envs, np.float64)  # [N] points in the running episode
        self.lengths = np.zeros(self.num_envs, np.int64)  # [N] steps of the running episode
        self.lives = np.zeros(self.num_envs, np.int64)  # [N] lives after the last step

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a new episode in every row; `seed` (one number, or one per row) defaults to `seeds`."""
        seed = self.seeds if seed is None else seed
        if isinstance(self.env, AtariVectorEnv) and isinstance(seed, list):
            seed = np.array(seed)
        with self._calling():
            obs, info = self.env.reset(seed=seed, options=options)
        self.scores[:], self.lengths[:] = 0.0, 0
        self.lives = np.array(info.get("lives", self.lives))
        return obs, {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step with `actions [N]`, from 0. ValueError for a bad one: ale-py would hang. WorkerError if an env fails."""
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu":
            raise ValueError(
                f"actions must be integers of shape ({self.num_envs},), got {actions.dtype} {actions.shape}"
            )
        if actions.min() < 0 or actions.max() >= self.n_actions:
            raise ValueError(
                f"actions must be at least 0 and below {self.n_actions}, got {actions.min()} to {actions.max()}"
            )
        actions = actions.astype(np.int64) + self.first_action
        with self._calling():
            obs, raw_rewards, terminated, truncated, info = self.env.step(actions)
            self._check_rewards(raw_rewards)
        rewards = np.asarray(raw_rewards, np.float32)
        ended = terminated | truncated
        self.scores += np.asarray(raw_rewards, np.float64)
        self.lengths += 1
        episodes = [Episode(int(i), float(self.scores[i]), int(self.lengths[i])) for i in np.flatnonzero(ended)]
        self.scores[ended], self.lengths[ended] = 0.0, 0
        final_obs = {int(i): np.array(info["final_obs"][i], obs.dtype) for i in np.flatnonzero(ended)}
        if self.terminal_on_life_loss:
            lives = np.array(info["lives"])  # where an episode ended, those of the next one
            final_lives = info.get("final_info", {}).get("lives", self.lives)
            lost = np.where(ended, final_lives, lives) < self.lives
            self.lives = lives
            terminated = terminated | lost
            final_obs |= {int(i): np.array(obs[i]) for i in np.flatnonzero(lost & ~ended)}
        return obs, rewards, terminated, truncated, {"final_obs": final_obs, "episodes": episodes}

    def state_dict(self) -> dict[str, Any] | None:
        """The running episodes, as plain values and arrays; None if the backend cannot save them (native)."""
        if not isinstance(self.env, AsyncVectorEnv | SyncVectorEnv):
            return None
        with self._calling():
            if not all(self.env.call("has_wrapper_attr", "exact")):  # not in a `SnapshotWrapper`
                return None
            snapshots = list(self.env.get_attr("snapshot"))
        return {"snapshots": snapshots, "scores": self.scores, "lengths": self.lengths, "lives": self.lives}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue the episodes of `state_dict`; False if an environment was not restored exactly.

        ValueError, in one line, for a damaged state.
        """
        counters = {name: _counter(name, state[name], getattr(self, name)) for name in ("scores", "lengths", "lives")}
        snapshots = state["snapshots"]
        if not isinstance(snapshots, list) or len(snapshots) != self.num_envs:
            found = len(snapshots) if isinstance(snapshots, list) else f"a {type(snapshots).__name__}"
            raise ValueError(f"snapshots must be a list of {self.num_envs}, got {found}")
        with self._calling():
            vector: Any = self.env
            vector.set_attr("snapshot", snapshots)
            exact, refusals = all(vector.get_attr("exact")), vector.get_attr("refusal")
        if any(refusals):
            raise ValueError(next(filter(None, refusals)))
        self.scores, self.lengths, self.lives = counters["scores"], counters["lengths"], counters["lives"]
        return exact

    def _check_rewards(self, rewards: np.ndarray) -> None:
        if np.shape(rewards) != (self.num_envs,):
            raise ValueError(f"its reward must be one number, got an array of shape {list(np.shape(rewards)[1:])}")

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Around every call of the environments: failures become WorkerError and set `broken`."""
        try:
            with self.watchdog or nullcontext():
                yield
        except Exception as error:
            self.broken = True
            if isinstance(error, WorkerError):
                raise
            raise worker_error(error) from error

    def close(self, **kwargs: Any) -> None:
        """Close the environments; worker processes that may no longer respond are killed."""
        vector = self.env
        if not isinstance(vector, AsyncVectorEnv):
            with suppress(WorkerError), self._calling():
                vector.close(**kwargs)
            return
        forced = self.broken or kwargs.get("terminate")  # gymnasium sends SIGTERM then, which workers ignore
        if not forced and vector._state == AsyncState.DEFAULT:
            if self.watchdog:
                self.watchdog.allow_exits()  # each worker ends after its environment's `close`
            with suppress(WorkerError), self._calling():
                vector.close(**kwargs)
        self.kill()

    def abandon(self) -> None:
        """Kill the worker processes, so that a thread waiting for a worker raises; `close` has still to be called."""
        self.broken = True
        for process in getattr(self.env, "processes", []):
            process.kill()

    def kill(self) -> None:
        """End the worker processes without waiting for what they do; nothing happens on backends that have none."""
        vector: Any = self.env
        if self.watchdog is None:
            return
        self.watchdog.close()
        end_processes(vector.processes)
        for pipe in filter(None, vector.parent_pipes):
            pipe.close()
        vector.closed = True


def _end(watchdog: Watchdog, processes: Sequence[BaseProcess]) -> None:
    """End what belonged to environments that nobody holds any more."""
    watchdog.stop()
    end_processes(processes)  # gymnasium would wait for a worker that hangs


def _counter(name: str, saved: Any, current: np.ndarray) -> np.ndarray:
    """A copy of the `saved` values `[N]`; ValueError if they are unlike the `current` ones."""
    if not isinstance(saved, np.ndarray) or (saved.shape, saved.dtype) != (current.shape, current.dtype):
        raise ValueError(f"{name} must be an array of {current.dtype} {list(current.shape)}, got {saved!r:.60}")
    return saved.copy()

"""A vector environment as the rest of the package sees it. It must not import torch.

The contract of `MonitoredVectorEnv`, whatever the backend:

========== ======================= ==========================================================
name       shape, dtype            meaning
========== ======================= ==========================================================
obs        [N, K, S, S] uint8      K = frame_stack; newest frame last; frames before a game's start are zeros
                                   (other ids: the environment's own observation)
rewards    [N] float32             raw game points of this decision
terminated [N] bool                the episode ended by the game's rules (or by a lost life)
truncated  [N] bool                the game was cut off at `max_episode_frames`; where a life was lost in that very
                                   decision, `terminated` is set too (not by native, which tells the next game's lives)
info       "final_obs"             {row: true last observation} of exactly the rows that ended
info       "episodes"              list of `Episode`, one per *game* that ended in this step
========== ======================= ==========================================================

Autoreset is SAME_STEP: where an episode ended, `obs` already begins the next one, so no junk
transition exists. A lost life ends an episode for the learner and never resets the game.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.async_vector_env import AsyncState

from a2c.processes.errors import WorkerError, worker_error
from a2c.processes.watchdog import Watchdog

# gymnasium echoes a worker's traceback as warnings; the WorkerError that follows carries it.
warnings.filterwarnings("ignore", message=r"\x1b\[[\d;]*mERROR: ")


class Episode(NamedTuple):
    """One finished game: its environment, true score (game points) and length (decisions)."""

    env: int
    score: float
    length: int


class MonitoredVectorEnv(VectorWrapper):
    """Hide the backends' differences and count games from raw rewards (the contract above).

    Wraps any SAME_STEP gymnasium vector environment; ValueError for another autoreset mode.
    The environments must not hand out the array of a final observation again; `SnapshotWrapper` copies it.
    Every question to the environments ends: with an answer, or with WorkerError, after
    `timeout` seconds at most where worker processes are asked.
    """

    def __init__(
        self,
        env: VectorEnv,
        seeds: Sequence[int] | None = None,
        terminal_on_life_loss: bool = False,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(env)
        if env.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise ValueError(f"autoreset_mode must be SAME_STEP, got {env.metadata.get('autoreset_mode')}")
        space = env.single_action_space
        if not isinstance(space, gym.spaces.Discrete):
            raise ValueError(f"env must have a discrete action space, got {env.single_action_space}")
        self.actions = space
        self.seeds = list(range(self.num_envs)) if seeds is None else list(seeds)
        self.terminal_on_life_loss = terminal_on_life_loss
        self.watchdog = Watchdog(timeout, lambda: env.processes) if isinstance(env, AsyncVectorEnv) else None
        self.broken = False  # an environment failed: nothing more may be asked of the others
        self.scores = np.zeros(self.num_envs, np.float64)  # [N] points of the running game
        self.lengths = np.zeros(self.num_envs, np.int64)  # [N] decisions of the running game
        self.lives = np.zeros(self.num_envs, np.int64)  # [N] lives after the last decision

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a new game in every row; `seed` (one number, or one per row) defaults to the rows' own."""
        seed = self.seeds if seed is None else seed
        if isinstance(self.env, AtariVectorEnv) and isinstance(seed, list):
            seed = np.array(seed)
        with self._asking():
            obs, info = self.env.reset(seed=seed, options=options)
        self.scores[:], self.lengths[:] = 0.0, 0
        self.lives = np.array(info.get("lives", self.lives))
        return obs, {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Play one decision in every row. ValueError for a bad action: ale-py would hang on it."""
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu":
            raise ValueError(
                f"actions must be integers of shape ({self.num_envs},), got {actions.dtype} {actions.shape}"
            )
        n_actions = int(self.actions.n)
        if actions.min() < 0 or actions.max() >= n_actions:
            raise ValueError(
                f"actions must be at least 0 and below {n_actions}, got {actions.min()} to {actions.max()}"
            )
        actions = actions.astype(np.int64) + self.actions.start
        with self._asking():
            obs, raw_rewards, terminated, truncated, info = self.env.step(actions)
        rewards = np.asarray(raw_rewards, np.float32)
        game_over = terminated | truncated
        self.scores += np.asarray(raw_rewards, np.float64)
        self.lengths += 1
        episodes = [Episode(int(i), float(self.scores[i]), int(self.lengths[i])) for i in np.flatnonzero(game_over)]
        self.scores[game_over], self.lengths[game_over] = 0.0, 0
        final_obs = {int(i): np.array(info["final_obs"][i]) for i in np.flatnonzero(game_over)}
        if self.terminal_on_life_loss:
            lives = np.array(info["lives"])  # where a game ended, those of the next one
            final_lives = info.get("final_info", {}).get("lives", self.lives)
            lost = np.where(game_over, final_lives, lives) < self.lives
            self.lives = lives
            terminated = terminated | lost
            final_obs |= {int(i): np.array(obs[i]) for i in np.flatnonzero(lost & ~game_over)}
        return obs, rewards, terminated, truncated, {"final_obs": final_obs, "episodes": episodes}

    def state_dict(self) -> dict[str, Any] | None:
        """The games as they stand, as plain values and arrays; None where the backend cannot tell (native)."""
        if not isinstance(self.env, AsyncVectorEnv | SyncVectorEnv):
            return None
        with self._asking():
            try:
                snapshots = list(self.env.get_attr("snapshot"))
            except AttributeError:  # environments that were not made here
                return None
        return {"snapshots": snapshots, "scores": self.scores, "lengths": self.lengths, "lives": self.lives}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on with the games of `state_dict`; False where one was not taken back exactly.

        ValueError, in one line, for a state that is damaged.
        """
        counters = {name: _counter(name, state[name], getattr(self, name)) for name in ("scores", "lengths", "lives")}
        snapshots = state["snapshots"]
        if not isinstance(snapshots, list) or len(snapshots) != self.num_envs:
            raise ValueError(f"snapshots must be a list of {self.num_envs}, got a {type(snapshots).__name__}")
        with self._asking():
            vector: Any = self.env
            vector.set_attr("snapshot", snapshots)
            exact, refusals = all(vector.get_attr("exact")), vector.get_attr("refusal")
        if any(refusals):
            raise ValueError(next(filter(None, refusals)))
        self.scores, self.lengths, self.lives = counters["scores"], counters["lengths"], counters["lives"]
        return exact

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Whatever an environment, or the process that runs it, fails with becomes a WorkerError."""
        try:
            with self.watchdog or nullcontext():
                yield
        except Exception as error:
            self.broken = True
            raise worker_error(error, self.watchdog) from error

    def close(self, **kwargs: Any) -> None:
        """End the environments; worker processes that cannot be asked any more are killed."""
        vector = self.env
        if not isinstance(vector, AsyncVectorEnv):
            with suppress(WorkerError), self._asking():
                vector.close(**kwargs)
            return
        forced = self.broken or kwargs.get("terminate")  # by SIGTERM, which workers ignore
        if not forced and vector._state == AsyncState.DEFAULT:
            with suppress(WorkerError), self._asking():
                vector.close(**kwargs)
        if self.watchdog is not None:
            self.watchdog.close()
        if not vector.closed:
            self.kill()

    def kill(self) -> None:
        """End worker processes without asking them."""
        vector: Any = self.env
        for process in vector.processes:
            process.kill()
        for process in vector.processes:
            process.join()
        for pipe in filter(None, vector.parent_pipes):
            pipe.close()
        vector.closed = True


def _counter(name: str, saved: Any, current: np.ndarray) -> np.ndarray:
    """A copy of a saved counter of each row."""
    if not isinstance(saved, np.ndarray) or (saved.shape, saved.dtype) != (current.shape, current.dtype):
        raise ValueError(f"{name} must be an array of {current.dtype} {list(current.shape)}, got {saved!r:.60}")
    return saved.copy()

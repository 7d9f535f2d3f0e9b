"""Vector environments on three backends, and the seeds of a run.

The contract of all backends is the docstring of `a2c.envs`. Preprocessing is that of DQN (Mnih et al., 2015, Methods):
up to `noop_max` no-ops, 4 frames per decision, maximum over the last two, grey, area-scaled. An episode begins with one
frame of FIRE where the game has that button (OpenAI Baselines: two decisions, of actions 1, FIRE, and 2, again after
every lost life).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import gymnasium as gym
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from a2c.config.config import Config
from a2c.envs.atari import FRAME_SKIP, sticky_probability
from a2c.envs.single import checked_spec, is_atari, make_snapshot_env
from a2c.envs.vector_env import MonitoredVectorEnv
from a2c.processes.errors import WorkerError, raising_worker_error, worker_error
from a2c.processes.limits import allow_open_files, available_cores
from a2c.processes.start import START_TIMEOUT, end_processes, is_ours, without_main, worker_context
from a2c.processes.watchdog import Watchdog

FILES_PER_WORKER = 4  # files that the parent has open for each: pipes, sentinels


def make_envs(config: Config, seeds: Sequence[int] | None = None, spec: EnvSpec | None = None) -> MonitoredVectorEnv:
    """Start `config.num_envs` environments; `reset()` seeds row i with `seeds[i]` (default: those of `run_seeds`).

    `spec` is needed only for an id that is not registered in this process. Raises ValueError, before any process
    starts, for an unknown id (with the nearest names), for actions that are not discrete, for a backend that
    does not support the id, or for another number of seeds; WorkerError if an environment fails.
    """
    spec = spec or checked_spec(config)
    seeds = run_seeds(config).envs if seeds is None else list(seeds)
    if len(seeds) != config.num_envs:
        raise ValueError(f"seeds must have one entry per environment ({config.num_envs}), got {len(seeds)}")
    envs = [partial(make_snapshot_env, config, spec, seed) for seed in seeds]
    vector: VectorEnv
    with raising_worker_error(ValueError):
        if config.backend == "async":
            with without_main():  # one thread at a time: `_workers` counts open files and the processes that begin
                vector = _workers(config, envs)
        elif config.backend == "sync":
            vector = SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP)
        else:
            vector = _native(config, spec)
    return MonitoredVectorEnv(vector, seeds, config.terminal_on_life_loss, config.env_timeout, is_atari(spec))


def make_groups(config: Config, seeds: Sequence[int], groups: int, threads: int = 1) -> list[MonitoredVectorEnv]:
    """An environment for each of `seeds`, in `groups` of almost equal size, in order.

    `threads` is the number of emulator threads (native) or of workers that run at once, less one (async) in each group.
    Raises what `make_envs` raises; no environment is left open then.
    """
    made: list[MonitoredVectorEnv] = []
    if config.backend == "async":
        _allow_workers(len(seeds))
    try:
        for part in np.array_split(seeds, groups):
            made.append(make_envs(replace(config, num_envs=len(part), threads=threads), part.tolist()))
    except BaseException:
        for envs in made:
            envs.close()
        raise
    return made


class RunSeeds(NamedTuple):
    """The seeds of environments and actions. Parameters are drawn with `config.seed` itself, the order of minibatches
    with that and the number of updates.
    """

    envs: list[int]  # one per environment
    sampling: int  # for the actions of the first group or worker; see `sampling_seed`


def sampling_seed(first: int, part: int) -> int:
    """The seed for sampling actions in group or worker `part` of a run whose first part has the seed `first`."""
    return first + 7919 * part


def run_seeds(config: Config, env_steps: int = 0) -> RunSeeds:
    """The seeds of a run that starts, or is resumed, at `env_steps`: a resumed run does not replay its first episodes.

    Environment seeds come from numpy's SeedSequence: runs with neighbouring seeds share none of them.
    """
    states = np.random.SeedSequence((config.seed, env_steps)).generate_state(config.num_envs)
    return RunSeeds([int(state) >> 1 for state in states], config.seed + env_steps)


def _native(config: Config, spec: EnvSpec) -> VectorEnv:
    env = AtariVectorEnv(
        spec.kwargs["game"],
        config.num_envs,
        num_threads=min(config.threads or available_cores(), config.num_envs),
        max_num_frames_per_episode=config.max_episode_frames // FRAME_SKIP * FRAME_SKIP,
        repeat_action_probability=sticky_probability(config, spec),
        full_action_space=spec.kwargs.get("full_action_space", False),
        autoreset_mode=AutoresetMode.SAME_STEP,
        img_height=config.frame_size,
        img_width=config.frame_size,
        stack_num=config.frame_stack,
        frameskip=FRAME_SKIP,
        noop_max=config.noop_max,
        reward_clipping=False,
    )
    # All instances of the class share one dictionary of metadata.
    env.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
    return env


class A2CWorkerEnv(AsyncVectorEnv):
    """gymnasium's class under a name that becomes part of its processes' names: it begins with WORKER_NAME."""


def _workers(config: Config, envs: Sequence[Callable[[], gym.Env]]) -> AsyncVectorEnv:
    """One process per environment; WorkerError if one fails to start, and none is left then."""
    _allow_workers(len(envs))
    before = set(multiprocessing.active_children())  # such as the workers of other groups
    seen: set[BaseProcess] = set()

    def started() -> list[BaseProcess]:
        seen.update(p for p in multiprocessing.active_children() if is_ours(p) and p not in before)
        return list(seen)

    watchdog = Watchdog(max(config.env_timeout, START_TIMEOUT), started)
    try:
        with watchdog:
            vector = A2CWorkerEnv(
                envs,
                autoreset_mode=AutoresetMode.SAME_STEP,
                copy=False,
                context=worker_context(["a2c.envs.make"]),
                max_concurrency=_concurrency(config),
            )
    except BaseException as error:
        end_processes(started())
        if isinstance(error, ValueError | WorkerError) or not isinstance(error, Exception):  # the last: Ctrl-C
            raise
        raise worker_error(error) from error
    finally:
        watchdog.close()
    # While this end is open here, reading the queue of errors would wait for ever once all workers have died.
    vector.error_queue._writer.close()  # type: ignore[attr-defined]
    return vector


def _allow_workers(count: int) -> None:
    """Raise the limit of open files for `count` workers; ValueError if the system allows fewer."""
    rule = f"num_envs must fit the limit of open files, got {count}"
    allow_open_files(FILES_PER_WORKER * count, rule, "fewer, or backend native or sync")


def _concurrency(config: Config) -> int:
    """Number of workers that may run at once: many more than the cores only add context switches."""
    return min(config.num_envs, (config.threads or available_cores()) + 1)

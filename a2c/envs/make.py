"""Starting vector environments: three backends. It must not import torch.

The contract that all of them keep stands in `a2c.envs.vector_env`. Preprocessing follows Machado et al.
(2018), section 3: up to `noop_max` no-ops, one FIRE where the game has that button, 4 frames
per decision, maximum over the last two, grey, area-scaled.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess

import gymnasium as gym
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from a2c.config.config import Config
from a2c.config.validation import FRAME_SKIP
from a2c.envs.atari import sticky_probability
from a2c.envs.single import checked_spec, make_snapshot_env
from a2c.envs.vector_env import MonitoredVectorEnv
from a2c.processes.errors import failing, worker_error
from a2c.processes.start import allow_open_files, available_cores, is_ours, without_main, worker_context
from a2c.processes.watchdog import Watchdog

FILES_PER_WORKER = 4  # that its parent has open: pipes, sentinels
START_TIMEOUT = 300.0  # seconds in which a process of each environment must have started


def make_envs(config: Config, seeds: Sequence[int] | None = None, spec: EnvSpec | None = None) -> MonitoredVectorEnv:
    """Start `config.num_envs` environments; `reset()` seeds row i with `seeds[i]`.

    `seeds` are drawn from `config.seed` unless they are given; `spec` is that of an id which this process
    may not know. Raises ValueError, before any
    process starts, for an unknown id (with the nearest names), an action space that is not
    discrete, or a backend that cannot play the id.
    """
    spec = spec or checked_spec(config)
    seeds = row_seeds(config) if seeds is None else list(seeds)
    envs = [partial(make_snapshot_env, config, spec, seed) for seed in seeds]
    vector: VectorEnv
    with failing(ValueError):
        if config.backend == "async":
            vector = _workers(config, envs)
        elif config.backend == "sync":
            vector = SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP)
        else:
            vector = _native(config, spec)
    return MonitoredVectorEnv(vector, seeds, config.terminal_on_life_loss, config.env_timeout)


def make_groups(config: Config, groups: int, threads: int = 1, env_steps: int = 0) -> list[MonitoredVectorEnv]:
    """The environments of a run in `groups` of almost equal size, in order.

    `threads` is the number of emulator threads (native) or busy workers (async) of each group;
    `env_steps`, the age of a resumed run, keeps it from playing its first games again.
    """
    made: list[MonitoredVectorEnv] = []
    if config.backend == "async":
        _allow_workers(config.num_envs)
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
    states = np.random.SeedSequence((config.seed, env_steps)).generate_state(config.num_envs)
    return [int(state) >> 1 for state in states]


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
        stack_num=config.frame_stack,
        frameskip=FRAME_SKIP,
        noop_max=config.noop_max,
        reward_clipping=False,
    )
    # The class shares one metadata dictionary between all instances.
    env.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
    return env


class A2CWorkerEnv(AsyncVectorEnv):
    """gymnasium's own; its name becomes part of its processes' names, by which `processes.is_ours` knows them."""


def _workers(config: Config, envs: Sequence[Callable[[], gym.Env]]) -> AsyncVectorEnv:
    """A process per environment; WorkerError when one of them fails to start, and then none is left."""
    _allow_workers(len(envs))
    before = set(multiprocessing.active_children())  # among them the workers of other groups
    seen: set[BaseProcess] = set()

    def started() -> list[BaseProcess]:
        seen.update(p for p in multiprocessing.active_children() if is_ours(p) and p not in before)
        return list(seen)

    watchdog = Watchdog(max(config.env_timeout, START_TIMEOUT), started)
    try:
        with without_main(), watchdog:
            vector = A2CWorkerEnv(
                envs,
                autoreset_mode=AutoresetMode.SAME_STEP,
                copy=False,
                context=worker_context(["a2c.envs.make"]),
                max_concurrency=_concurrency(config),
            )
    except BaseException as error:
        for process in started():
            process.kill()
            process.join()
        if isinstance(error, ValueError) or not isinstance(error, Exception):  # a refusal, or Ctrl-C
            raise
        raise worker_error(error, watchdog) from error
    finally:
        watchdog.close()
    # With this end open here, reading the queue of errors would wait for ever once all workers have died.
    vector.error_queue._writer.close()  # type: ignore[attr-defined]
    return vector


def _allow_workers(count: int) -> None:
    """Raise the limit of open files as far as `count` workers need it; ValueError where the system refuses."""
    rule = f"num_envs must leave files to open, got {count}"
    allow_open_files(FILES_PER_WORKER * count, rule, "fewer, or backend native or sync")


def _concurrency(config: Config) -> int:
    """Workers that may emulate at once: a few more than the cores only adds context switches."""
    return min(config.num_envs, (config.threads or available_cores()) + 1)

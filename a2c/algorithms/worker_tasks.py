"""Worker tasks: which environments each process of a3c and ga3c runs, and with which settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch.multiprocessing  # noqa: F401  tensors in shared memory cross to a worker as such
from gymnasium.vector.utils import CloudpickleWrapper
from torch import Tensor

from a2c.config.config import Backend, Config
from a2c.envs.make import make_envs, run_seeds, sampling_seed
from a2c.envs.single import checked_spec
from a2c.envs.vector_env import MonitoredVectorEnv
from a2c.processes.errors import WorkerError
from a2c.processes.limits import allow_open_files, available_cores
from a2c.rollout import split_edges

FILES_PER_WORKER = 10  # that the run's process has open: pipes, sentinels, tensors in shared memory
MOST_SHARED = 248  # tensors in shared memory for a worker: Linux passes 253 open files at once, with Python's and ours
READY = "ready"  # a worker's first message, unless it sends something else


class WithoutEpisodes:
    """An algorithm whose running episodes end with its workers: they cannot be saved."""

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """False: every environment starts a new episode."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class WorkerTask(NamedTuple):
    """The part of a run that one worker process runs."""

    number: int
    config: Config  # as if the worker's environments were all there are
    spec: Any  # a CloudpickleWrapper of an EnvSpec: the caller's script may have registered it, which no worker runs
    seeds: list[int]  # one per environment
    sampling_seed: int

    def make_envs(self) -> MonitoredVectorEnv:
        """The environments of this task."""
        return make_envs(self.config, self.seeds, self.spec.fn)


def worker_count(config: Config) -> int:
    """Workers of a3c, or actors of ga3c; 0 for a2c, which has none."""
    if config.algorithm == "a2c":
        return 0
    if config.algorithm == "a3c":
        return config.workers or min(available_cores(), config.num_minibatches, config.num_envs)
    return min(config.num_envs, config.workers or 2 * available_cores())


def worker_backend(config: Config) -> Backend:
    """Where the environments of a worker run."""
    return "native" if config.backend == "native" else "sync"


def make_tasks(config: Config, env_steps: int) -> list[WorkerTask]:
    """Distribute the environments over the workers, those of a3c in whole minibatches.

    A minibatch has the size of a2c's (`Rollout.split`) on every machine, and there are as many per rollout. So a3c has
    at most `num_minibatches` workers. Each shuffles the decisions of its own environments. Where there are more
    minibatches than environments, a worker's share of them is that of its environments, rounded: they are at most
    twice as large as a2c's.
    """
    batches, envs = config.num_minibatches, config.num_envs
    seeds, workers = run_seeds(config, env_steps), worker_count(config)
    if config.algorithm == "a3c":
        edges, shares = split_edges(envs, batches), []
        for columns in np.array_split(np.arange(len(edges) - 1), workers):
            low, high = edges[columns[0]], edges[columns[-1] + 1]
            shares.append((seeds.envs[low:high], batches * high // envs - batches * low // envs))
    else:  # actors of ga3c learn nothing, its trainer does
        dealt = np.array_split(seeds.envs, workers)
        shares = [(own.tolist(), 1) for own in dealt]
    tasks, spec = [], CloudpickleWrapper(checked_spec(config))  # type: ignore[arg-type]
    for number, (own, learned) in enumerate(shares):
        mine = replace(config, backend=worker_backend(config), threads=1, workers=0, cuda=False)
        mine = replace(mine, num_envs=len(own), num_minibatches=learned)
        tasks.append(WorkerTask(number, mine, spec, own, sampling_seed(seeds.sampling, number)))
    return tasks


def allow_workers(config: Config, tasks: Sequence[WorkerTask]) -> None:
    """Raise the limit of open files as far as `tasks` need it; ValueError if the system refuses."""
    rule = f"workers and num_envs must fit the limit of open files, got {len(tasks)} and {config.num_envs}"
    allow_open_files(FILES_PER_WORKER * len(tasks), rule, "fewer workers")


def move_to_shared_memory(tensors: Sequence[Tensor]) -> None:
    """Move tensors to shared memory, in place.

    WorkerError if there is none left, ValueError if they are more than a worker can be given.
    """
    if len(tensors) > MOST_SHARED:
        rule = f"network and workers must share at most {MOST_SHARED} tensors (parameters, optimiser, pixel statistics)"
        raise ValueError(f"{rule}, got {len(tensors)}: use fewer workers, or algorithm a2c")
    try:
        for tensor in tensors:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        raise WorkerError(f"no shared memory for the workers: {' '.join(str(error).split())[:200]}") from error

"""The policy of a trained run."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.envs.single import EnvFn, probe_spaces, register_env
from a2c.networks import NetworkFn
from a2c.processes.errors import raising_worker_error
from a2c.run.checkpoint import LATEST, CheckpointError, load_checkpoint, make_checked, raising_checkpoint_error


def load_policy(
    run_dir: Path,
    checkpoint: str = "latest.pt",
    cuda: bool = False,
    network: NetworkFn | None = None,
    env_fn: EnvFn | None = None,
) -> tuple[Config, nn.Module, dict[str, Any]]:
    """Config, network (in evaluation mode) and checkpoint of a run.

    `checkpoint`: `latest.pt`, `best.pt` or `policies/...` in the run directory, or the path of a file elsewhere.
    `run_dir` may also be a checkpoint itself. `network` and `env_fn`: what the `Trainer` was given.
    Raises CheckpointError for a checkpoint that cannot be used, ValueError for an environment that is unknown
    here, WorkerError for one that fails. Nothing large is allocated before the checkpoint fits the environment.
    """
    if Path(run_dir).is_file():
        if checkpoint != LATEST:
            raise ValueError(f"checkpoint must be left out where run_dir is a file, got {checkpoint}")
        run_dir, checkpoint = Path(run_dir).parent, Path(run_dir).name
    path = Path(run_dir) / checkpoint
    if os.path.dirname(checkpoint) and not path.is_file() and Path(checkpoint).is_file():
        path = Path(checkpoint)
    with closing(Compute(Config(threads=1))):  # operators on one thread
        return _load_policy(path, cuda, network, env_fn)


def _load_policy(
    path: Path, cuda: bool, network: NetworkFn | None, env_fn: EnvFn | None
) -> tuple[Config, nn.Module, dict[str, Any]]:
    state = load_checkpoint(path)
    try:
        config = replace(Config.from_json(state["config"]), cuda=cuda, resume=None, algorithm="a2c", threads=0)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} holds a bad config: {error}") from error
    config = replace(config, env=register_env(env_fn)) if env_fn else config
    with raising_worker_error(ValueError):
        spaces = probe_spaces(config)
    with raising_checkpoint_error(path):
        net = make_checked(state, config, spaces, path, network)
        net.load_state_dict(state["network"], assign=True)
    return config, net.eval(), state

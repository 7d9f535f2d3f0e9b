"""The policy of a trained run."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.envs.single import EnvFn, Spaces, probe_spaces, register_env
from a2c.networks import NetworkFn
from a2c.processes.errors import raising_worker_error
from a2c.run.checkpoint import BEST, LATEST, CheckpointError, load_checkpoint, make_checked, raising_checkpoint_error


class Custom(NamedTuple):
    """What the `Trainer` of a run was given that is not built in, and that no checkpoint holds."""

    network: NetworkFn | None = None
    env_fn: EnvFn | None = None


NOT_CUSTOM = Custom()
AfterDecision = Callable[[int, list[float]], object]  # is called with the decisions and the scores so far


def checkpoint_path(run_dir: Path, checkpoint: str | None = None) -> Path:
    """The checkpoint file that `run_dir` and `checkpoint` name; it may be missing.

    `run_dir`: a run directory, or a checkpoint. `checkpoint`: `latest.pt`, `best.pt` or `policies/...` in the run
    directory, or the path, with a slash, of a file elsewhere; None: `best.pt` where there is one, else `latest.pt`.
    ValueError for a `checkpoint` beside a `run_dir` that is a file, or is named like one.
    """
    run_dir = Path(os.path.expanduser(run_dir))
    if run_dir.is_file() or (run_dir.suffix == ".pt" and not run_dir.is_dir()):
        if checkpoint is not None:
            raise ValueError(f"checkpoint must be left out where run_dir is a file, got {checkpoint}")
        return run_dir
    if checkpoint is None:
        return run_dir / (BEST if (run_dir / BEST).is_file() else LATEST)
    path, elsewhere = run_dir / checkpoint, Path(os.path.expanduser(checkpoint))
    return elsewhere if os.path.dirname(checkpoint) and not path.is_file() and elsewhere.is_file() else path


class LoadedPolicy(NamedTuple):
    """The policy of a checkpoint."""

    checkpoint: Path
    config: Config
    spaces: Spaces
    net: nn.Module  # in evaluation mode
    state: dict[str, Any]  # content of the checkpoint

    @property
    def env_steps(self) -> int:
        """Decisions that the policy has learned from."""
        steps: int = self.state["env_steps"]
        return steps


def load_policy(
    run_dir: str | Path, checkpoint: str | None = None, cuda: bool = False, custom: Custom = NOT_CUSTOM
) -> LoadedPolicy:
    """The policy of the checkpoint that `checkpoint_path` finds.

    Raises CheckpointError for a checkpoint that cannot be used, ValueError for an environment that is unknown
    here, WorkerError for one that fails. Nothing large is allocated before the checkpoint fits the environment.
    """
    path = checkpoint_path(Path(run_dir), checkpoint)
    with closing(Compute(Config(threads=1))):  # operators on one thread
        state = load_checkpoint(path)
        try:
            config = replace(Config.from_json(state["config"]), cuda=cuda, resume=None, algorithm="a2c", threads=0)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {path} holds a bad config: {error}") from error
        config = replace(config, env=register_env(custom.env_fn)) if custom.env_fn else config
        with raising_worker_error(ValueError):
            spaces = probe_spaces(config)
        with raising_checkpoint_error(path):
            net = make_checked(state, config, spaces, path, custom.network)
            net.load_state_dict(state["network"], assign=True)
        return LoadedPolicy(path, config, spaces, net.eval(), state)

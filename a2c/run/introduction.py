"""What a run prints before it starts: what will be trained, on what, and where to watch it."""

from __future__ import annotations

import shlex
from pathlib import Path

from torch import nn

from a2c.algorithms.worker_tasks import worker_backend, worker_count
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.config.extras import has_extra
from a2c.envs.atari import sticky_probability
from a2c.envs.single import Spaces, find_spec
from a2c.metrics.text import format_number


def introduction(config: Config, spaces: Spaces, net: nn.Module, compute: Compute, run_dir: Path) -> list[str]:
    """Seven lines about a run whose settings are resolved."""
    parameters = sum(parameter.numel() for parameter in net.parameters())
    lines = {
        "run directory": str(run_dir),
        "environment": f"{config.env} ({_protocol(config, spaces)})",
        "algorithm": f"{config.algorithm}: {_workers(config)}{_rollouts(config, net)}",
        "network": f"{config.network}, {parameters:,} parameters",
        "device": f"{compute.device}, {compute.precision_name}, {_computing(compute)}",
        "length": _length(config),
        "to watch": _watch(run_dir),
    }
    return [f"{name:15}{text}" for name, text in lines.items()]


def _computing(compute: Compute) -> str:
    """Threads and ranks, and on a GPU whether there are CUDA graphs."""
    threads = _count(compute.threads, "thread")
    ranks = f" on each of {compute.ranks.size} ranks" if compute.ranks.size > 1 else ""
    graphs = f", {'' if compute.cuda_graphs else 'no '}CUDA graphs" if compute.device.type == "cuda" else ""
    return threads + ranks + graphs


def _protocol(config: Config, spaces: Spaces) -> str:
    """What an observation and a decision are, and outside Atari, where nobody expects it, that rewards are clipped."""
    shape = "x".join(map(str, spaces.obs_shape))
    if not spaces.stacked:
        clip = f", rewards clipped to {config.reward_clip:g}" if config.reward_clip else ""
        return f"observations {shape}{clip}"
    sticky = sticky_probability(config, find_spec(config.env))
    no_ops = f"up to {config.noop_max} no-ops" if config.noop_max else "no no-ops"
    protocol = f"{shape}, frame skip {spaces.frames_per_step}, sticky actions {sticky:g}, {no_ops}"
    return f"{protocol}, lost lives are terminal" if config.terminal_on_life_loss else protocol


def _watch(run_dir: Path) -> str:
    """The command that shows the run, by what is installed; without any, the picture of its curve."""
    if has_extra("report"):
        return f"a2c watch {shlex.quote(str(run_dir))}"
    if has_extra("tensorboard"):
        return f"tensorboard --logdir {shlex.quote(str(run_dir))}"
    return str(run_dir / "curve.png")


def _workers(config: Config) -> str:
    if config.algorithm == "a2c":
        return ""
    return _count(worker_count(config), "worker" if config.algorithm == "a3c" else "actor") + ", "


def _rollouts(config: Config, net: nn.Module) -> str:
    """How much is collected at a time, and how it is learned from."""
    backend = config.backend if config.algorithm == "a2c" else worker_backend(config)
    environments = _count(config.num_envs, f"{backend} environment")
    rollouts = f"{environments} x {_count(config.rollout_steps, 'step')}"
    if config.sliding_batch:
        return f"{rollouts}, windows in minibatches of {config.sliding_batch}"
    recurrent = getattr(net, "rnn_state_size", 0) > 0  # whole windows; the config does not know one's own networks
    minibatches = min(config.num_minibatches, config.num_envs) if recurrent else config.num_minibatches
    return f"{rollouts}, {_count(minibatches, 'minibatch', 'es')}, {_count(config.epochs, 'epoch')}"


def _length(config: Config) -> str:
    """When the run will end."""
    budget = f"{config.total_env_steps:,} decisions"
    if config.target_score is None:
        return budget
    return f"{budget}, or until the mean of 100 episodes is {format_number(config.target_score)}"


def _count(number: int, name: str, plural: str = "s") -> str:
    return f"{number} {name}{'' if number == 1 else plural}"

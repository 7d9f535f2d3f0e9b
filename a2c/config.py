"""Every setting of a run: one frozen dataclass and its rules.

Only plain values live here. This module imports neither torch nor gymnasium, so `--help`,
a wrong flag and the worker processes stay fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from a2c.presets import PRESETS

FRAME_SKIP = 4  # emulator frames per agent decision, in every backend
FRAME_STACK = 4  # newest frames that one observation holds


Backend = Literal["async", "native", "sync"]
Network = Literal["auto", "atari", "small", "nature", "mlp"]
Precision = Literal["auto", "float32", "bfloat16"]

INT_RULES = {
    "num_envs": (1, 10_000),
    "frame_size": (36, 512),
    "noop_max": (0, 10_000),
    "max_episode_frames": (FRAME_SKIP, 2**31 - 1),
    "rollout_steps": (1, 100_000),
    "batches_per_rollout": (1, 10_000),
    "sliding_batch": (0, 1_000_000),
    "total_env_steps": (1, 10**15),
    "stop_after": (0, 10**15),
    "seed": (0, 2_000_000_000),
    "threads": (0, 1024),
    "checkpoint_every": (1, 10**15),
    "max_worker_restarts": (0, 1_000_000),
}
FLOAT_RULES = {
    "sticky_actions": (0.0, 1.0),
    "reward_clip": (0.0, 1e9),
    "gamma": (0.0, 1.0),
    "gae_lambda": (0.0, 1.0),
    "learning_rate": (0.0, 10.0),
    "adam_eps": (0.0, 1.0),
    "entropy_coef": (0.0, 100.0),
    "value_coef": (0.0, 100.0),
    "max_grad_norm": (0.0, 1e9),
    "stop_reward": (-1e12, 1e12),
    "log_every": (0.0, 86_400.0),
    "env_timeout": (0.0, 86_400.0),
}


@dataclass(frozen=True)
class Config:
    """One training run. Units: `env_steps` are agent decisions summed over environments."""

    preset: str = "default"
    """Named set of values that the other flags start from: default, pong-fast, cartpole or book."""

    # --- environments -------------------------------------------------------------------
    env: str = "PongNoFrameskip-v4"
    """Gymnasium id of the game (any id with a discrete action space)."""
    backend: Backend = "async"
    """async: one process per environment; native: ale-py's C++ threads (Atari only); sync: one loop."""
    num_envs: int = 50
    """Environments that play side by side (count)."""
    frame_size: int = 84
    """Height and width of an Atari observation (pixels)."""
    noop_max: int = 30
    """Most no-op frames at the start of a game (emulator frames; 0 = none)."""
    sticky_actions: float | None = None
    """Probability that the emulator repeats the last action (0 to 1; None = the id's own protocol)."""
    end_of_life: bool = False
    """Treat a lost life as the end of an episode for learning; the game itself goes on."""
    max_episode_frames: int = 108_000
    """Length at which a game is cut off, i.e. truncated (emulator frames)."""
    reward_clip: float = 1.0
    """Bound on the size of each reward that is learned from (game points; 0 = no clipping)."""

    # --- network ------------------------------------------------------------------------
    network: Network = "auto"
    """auto: atari for images, mlp for vectors; nature: one shared 512 layer; small: for 42x42 frames."""
    normalize_obs: bool = True
    """Centre and scale each pixel of an image by its running mean and standard deviation (else divide by 256)."""
    precision: Precision = "auto"
    """Arithmetic of the network; auto takes bfloat16 where the processor has it. Parameters stay float32."""

    # --- learning -----------------------------------------------------------------------
    rollout_steps: int = 20
    """Length of a rollout (decisions per environment)."""
    batches_per_rollout: int = 5
    """Batches that a rollout is learned in, split by environment, one optimiser step each (count; at most num_envs)."""
    sliding_batch: int = 0
    """Learn from sliding windows of rollout_steps in batches of this many transitions (0 = off)."""
    gamma: float = 0.99
    """Discount per decision (0 to 1)."""
    gae_lambda: float = 0.95
    """Trace decay of the lambda-return; 1 is the n-step return (0 to 1)."""
    learning_rate: float = 0.003
    """Step size of Adam (per update)."""
    lr_decay: bool = True
    """Lower the learning rate linearly to zero at total_env_steps."""
    adam_eps: float = 1e-3
    """Term added to Adam's denominator (gradient units)."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus (per nat)."""
    value_coef: float = 0.5
    """Weight of the squared value error (per squared return)."""
    max_grad_norm: float = 0.5
    """Bound on the L2 norm of a gradient (gradient units; 0 = no clipping)."""

    # --- run ----------------------------------------------------------------------------
    total_env_steps: int = 1_500_000
    """Length of the run (env_steps)."""
    stop_after: int = 0
    """Leave early, as if interrupted, once the run is this long; --resume goes on (env_steps; 0 = off)."""
    stop_reward: float | None = None
    """Stop when the mean score of the last 100 games reaches this (game points; None = 18 for Pong, else never)."""
    seed: int = 0
    """Seed of environments, network and sampling (integer, 0 or more)."""
    cuda: bool = False
    """Use the GPU for acting and learning."""
    deterministic: bool = False
    """Take only operations that give the same bits on every run, also on the GPU (slower there)."""
    threads: int = 0
    """Compute threads, each with its share of the environments (count; 0 = the cores this process may use)."""
    env_timeout: float = 60.0
    """Longest wait for the answer of an environment's process before it is replaced (seconds)."""
    max_worker_restarts: int = 3
    """Times in a row, without progress, that failed environments are started again (count)."""
    run_dir: Path | None = None
    """Directory of the run (path; None = runs/ENV-PRESET-SEED-TIME)."""
    resume: Path | None = None
    """Run directory to go on with, from its newest checkpoint (path)."""
    checkpoint_every: int = 100_000
    """Distance between checkpoints (env_steps)."""
    log_every: float = 5.0
    """Distance between progress lines and rows of metrics.csv (seconds)."""
    progress: bool = True
    """Show the live progress display (plain lines where the output is no terminal)."""

    def __post_init__(self) -> None:
        for name in ("run_dir", "resume"):
            value = getattr(self, name)
            if value is not None:
                if not isinstance(value, str | Path):
                    raise ValueError(f"{name} must be a path, got {value!r}")
                object.__setattr__(self, name, Path(value))
        self.validate()
        object.__setattr__(self, "batches_per_rollout", min(self.batches_per_rollout, self.num_envs))

    def validate(self) -> None:
        """Raise ValueError naming the field, the rule and the value of the first bad setting."""
        _check_choice("preset", self.preset, tuple(PRESETS))
        for name, kind in (("backend", Backend), ("network", Network), ("precision", Precision)):
            _check_choice(name, getattr(self, name), get_args(kind))
        for name, (low, high) in INT_RULES.items():
            _check_number(name, getattr(self, name), low, high, integer=True)
        for name, (low, high) in FLOAT_RULES.items():
            if getattr(self, name) is not None or name not in ("sticky_actions", "stop_reward"):
                _check_number(name, getattr(self, name), low, high)
        for name in ("learning_rate", "adam_eps", "log_every", "env_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("end_of_life", "normalize_obs", "lr_decay", "cuda", "deterministic", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        changes = PRESETS[self.preset]
        if changes and all(getattr(self, name) == defaults[name] for name in changes):
            raise ValueError(f"preset must be resolved by Config.from_preset({self.preset!r}), got the plain defaults")
        if self.resume is not None and self.run_dir is not None:
            raise ValueError(f"run_dir must be left out when resume is set, got {self.run_dir}")
        if self.sliding_batch and self.gae_lambda != 1.0:
            raise ValueError(f"gae_lambda must be 1 when sliding_batch is set, got {self.gae_lambda}")
        if self.sliding_batch and self.batches_per_rollout != 1:
            raise ValueError(f"batches_per_rollout must be 1 when sliding_batch is set, got {self.batches_per_rollout}")
        if not self.env or not isinstance(self.env, str):
            raise ValueError(f"env must be a Gymnasium id, got {self.env!r}")

    @property
    def target_score(self) -> float | None:
        """Mean score that ends the run: `stop_reward`, or 18 where the game is Pong."""
        if self.stop_reward is not None:
            return self.stop_reward
        return 18.0 if "pong" in self.env.lower() else None

    def to_json(self) -> str:
        """The resolved configuration as JSON text; `from_json` reads it back."""
        values = dataclasses.asdict(self)
        return json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in values.items()}, indent=2) + "\n"

    @staticmethod
    def from_preset(name: str) -> Config:
        """The defaults with the changes of the preset `name`."""
        _check_choice("preset", name, tuple(PRESETS))
        return Config(**{"preset": name, **PRESETS[name]})

    @staticmethod
    def from_json(text: str) -> Config:
        """Read `to_json`'s text; ValueError names an unknown field or a bad value."""
        try:
            values: Any = json.loads(text)
        except RecursionError:
            raise ValueError("config must be a JSON object, got one nested too deeply") from None
        if not isinstance(values, dict):
            raise ValueError(f"config must be a JSON object, got {type(values).__name__}")
        names = {field.name for field in dataclasses.fields(Config)}
        for name in values:
            _check_choice("config field", name, tuple(names))
        return Config(**values)


def available_cores() -> int:
    """Cores this process may use: its affinity mask, within its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or the quota is "max"
        return cores


def nearest(name: str, known: tuple[str, ...] | list[str]) -> str:
    """A readable hint with the names closest to `name`, or all of them where none is close."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(known)[:20])}"


def _check_choice(field: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(
            f"{field} must be one of {', '.join(sorted(known))}, got {value!r}; {nearest(str(value), known)}"
        )


def _check_number(field: str, value: Any, low: float, high: float, integer: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        raise ValueError(f"{field} must be {'an integer' if integer else 'a number'}, got {value!r}")
    if math.isnan(value) or not low <= value <= high:
        raise ValueError(f"{field} must be at least {low} and at most {high}, got {value}")

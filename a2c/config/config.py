"""Every setting of a run: one frozen dataclass. Its rules stand in `a2c.config.validation`.

Only plain values live here. This module imports neither torch nor gymnasium, so `--help`,
a wrong flag and the worker processes stay fast.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from a2c.config.presets import PRESETS
from a2c.config.validation import check, check_choice

Algorithm = Literal["a2c", "a3c", "ga3c"]
Backend = Literal["async", "native", "sync"]
Network = Literal["auto", "atari", "small", "nature", "nips", "mlp", "lstm"]
Optimizer = Literal["adam", "rmsprop"]
Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class Config:
    """One training run. Units: `env_steps` are agent decisions summed over environments."""

    preset: str = "default"
    """Named set of values that the other flags start from (see the README's table)."""
    algorithm: Algorithm = "a2c"
    """a2c: all play, then all learn; a3c: workers that share one network; ga3c: players, a predictor, a trainer."""
    workers: int = 0
    """Processes of a3c (at most num_minibatches) and ga3c that play (count; 0 = one per core, for ga3c two)."""

    # --- environments -------------------------------------------------------------------
    env: str = "PongNoFrameskip-v4"
    """Gymnasium id of the game (any id with a discrete action space)."""
    backend: Backend = "async"
    """async: a process per environment (a3c, ga3c: a loop per worker); native: ale-py's C++ threads; sync: a loop."""
    num_envs: int = 50
    """Environments that play side by side (count)."""
    frame_size: int = 84
    """Height and width of an Atari observation (pixels)."""
    frame_stack: int = 4
    """Newest frames that an Atari observation holds (count)."""
    crop: bool = False
    """Keep only the rows 34 to 193 of an Atari screen, without score and lower rim."""
    noop_max: int = 30
    """Most no-op frames at the start of a game (emulator frames; 0 = none)."""
    sticky_actions: float | None = None
    """Probability that the emulator repeats the last action (0 to 1; None = the id's own protocol)."""
    terminal_on_life_loss: bool = False
    """Treat a lost life as the end of an episode for learning; the game itself goes on."""
    max_episode_frames: int = 108_000
    """Length at which a game is cut off, i.e. truncated (emulator frames)."""
    reward_clip: float = 1.0
    """Bound on the size of each reward that is learned from (game points; 0 = no clipping)."""

    # --- network ------------------------------------------------------------------------
    network: Network = "auto"
    """auto: atari for images, mlp for vectors; nature, nips, small: shared layers; lstm: with a memory."""
    lstm_units: int = 0
    """Size of the memory of --network lstm (units; 0 = 256 for images, 16 for vectors)."""
    normalize_obs: bool = True
    """Centre and scale images by a running mean and deviation, of each pixel (lstm: of whole frames); else / 256."""
    precision: Precision = "auto"
    """Arithmetic of the network; auto takes bfloat16 where the processor has it. Parameters stay float32."""

    # --- learning -----------------------------------------------------------------------
    rollout_steps: int = 20
    """Length of a rollout (decisions per environment)."""
    num_minibatches: int = 5
    """Batches that a rollout is learned in, split by environment, one optimiser step each (count; at most num_envs)."""
    sliding_batch: int = 0
    """Learn from sliding windows of rollout_steps in batches of this many transitions (0 = off)."""
    gamma: float = 0.99
    """Discount per decision (0 to 1)."""
    gae_lambda: float = 0.95
    """Trace decay of the lambda-return; 1 is the n-step return (0 to 1)."""
    learning_rate: float = 0.003
    """Step size of the optimiser (per update)."""
    lr_decay: bool = True
    """Lower the learning rate linearly to zero at total_env_steps."""
    optimizer: Optimizer = "adam"
    """Rule of the optimiser's step."""
    adam_eps: float = 1e-3
    """Term added to Adam's denominator (gradient units)."""
    rmsprop_decay: float = 0.99
    """Decay of RMSprop's mean of squared gradients (per update, 0 to 1)."""
    rmsprop_eps: float = 1e-5
    """Term added to RMSprop's denominator (gradient units; squared if inside)."""
    rmsprop_eps_inside: bool = False
    """Add rmsprop_eps under the root, as the first A3C programs did."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus (per nat)."""
    value_coef: float = 0.5
    """Weight of the squared value error (per squared return)."""
    log_eps: float | None = None
    """Take log(pi + log_eps) in the policy gradient, against lag (0 to 1; None = 1e-6 for ga3c, else 0)."""
    max_grad_norm: float = 0.5
    """Bound on the L2 norm of a gradient (gradient units; 0 = no clipping)."""

    # --- run ----------------------------------------------------------------------------
    total_env_steps: int = 1_500_000
    """Length of the run (env_steps)."""
    stop_after: int = 0
    """Leave early, as if interrupted, once the run is this long; --resume goes on (env_steps; 0 = off)."""
    target_score: float | None = None
    """Stop when the mean score of the last 100 games reaches this (game points; None = 18 for Pong, else never)."""
    seed: int = 0
    """Seed of environments, network and sampling (integer, 0 or more)."""
    cuda: bool = False
    """Use the GPU for acting and learning."""
    deterministic: bool = False
    """Take only operations that give the same bits on every run, also on the GPU (a2c; slower there)."""
    threads: int = 0
    """Compute threads, each with its share of the work (count; 0 = the cores; a worker of a3c has one)."""
    env_timeout: float = 60.0
    """Longest wait for a step of an environment's process; a3c, ga3c: for a worker's whole rollout (seconds)."""
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
        check(self)
        check_choice("preset", self.preset, tuple(PRESETS))
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        changes = PRESETS[self.preset]
        if changes and all(getattr(self, name) == defaults[name] for name in changes):
            raise ValueError(f"preset must be resolved by Config.from_preset({self.preset!r}), got the plain defaults")
        object.__setattr__(self, "num_minibatches", min(self.num_minibatches, self.num_envs))

    def to_json(self) -> str:
        """The resolved configuration as JSON text; `from_json` reads it back."""
        values = dataclasses.asdict(self)
        return json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in values.items()}, indent=2) + "\n"

    @staticmethod
    def from_preset(name: str) -> Config:
        """The defaults with the changes of the preset `name`."""
        check_choice("preset", name, tuple(PRESETS))
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
            check_choice("config field", name, tuple(names))
        return Config(**values)

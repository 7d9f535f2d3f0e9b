"""Every setting of a run, as one frozen dataclass: its type, its range, its default, its help text.

The rules between settings are in `a2c.config.validation`. This module imports neither torch nor gymnasium, so
`--help`, a wrong flag and the worker processes stay fast.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal

from a2c.config.presets import PRESETS
from a2c.config.validation import Range, check, check_choice, check_names

AlgorithmName = Literal["a2c", "a3c", "ga3c"]
Backend = Literal["async", "native", "sync"]
Network = Literal["auto", "atari", "small", "nature", "nips", "mlp", "lstm", "custom"]
Optimizer = Literal["adam", "rmsprop"]
Precision = Literal["auto", "float32", "bfloat16"]
PER_SESSION = ("run_dir", "resume", "stop_after")  # settings of one session, which are not part of a policy
# Settings that may change when a run of a comparison continues.
MAY_CHANGE = (*PER_SESSION, "progress", "log_every", "wandb", "eval_every", "eval_episodes")


@dataclass(frozen=True)
class Config:
    """The settings of one training run. `env_steps` count the agent's decisions, summed over all environments."""

    preset: str = "default"
    """Named set of defaults (--help-all shows its values)."""
    algorithm: AlgorithmName = "a2c"
    """a2c: collect, then learn; a3c: workers that share one network; ga3c: actors, a predictor and a trainer."""
    workers: Annotated[int, Range(0, 1024)] = 0
    """Workers of a3c (at most num_minibatches, num_envs), actors of ga3c (count; 0 = 1 per core, ga3c: 2 per core)."""

    # --- environments -------------------------------------------------------------------
    env: str = "PongNoFrameskip-v4"
    """Gymnasium id of the environment, or a short name such as pong (any with a discrete action space)."""
    backend: Backend = "async"
    """async: a process per environment (a3c, ga3c: as sync); native: ale-py's C++ threads; sync: a plain loop."""
    num_envs: Annotated[int, Range(1, 10_000)] = 50
    """Number of parallel environments (count)."""
    frame_size: Annotated[int, Range(36, 512)] = 84
    """Height and width of an Atari observation (pixels)."""
    frame_stack: Annotated[int, Range(1, 16)] = 4
    """Frames stacked in an Atari observation (count)."""
    crop: bool = False
    """Keep only rows 34 to 193 of an Atari screen, without the score and the lower border."""
    noop_max: Annotated[int, Range(0, 10_000)] = 30
    """Maximum number of random no-ops at the start of an episode (Atari; emulator frames; 0 = none)."""
    sticky_actions: Annotated[float | None, Range(0.0, 1.0)] = None
    """Probability that the emulator repeats the last action (Atari; 0 to 1; None = as registered for the id)."""
    terminal_on_life_loss: bool = False
    """Treat a lost life as terminal for learning (lstm: restart its state, too); the episode itself continues."""
    max_episode_frames: Annotated[int, Range(4, 2**31 - 1)] = 108_000  # at least one step of `envs.atari.FRAME_SKIP`
    """Length at which an episode is truncated (Atari; emulator frames)."""
    reward_clip: Annotated[float, Range(0.0, 1e9)] = 1.0
    """Clip the rewards that are learned from to this magnitude (points; 0 = no clipping)."""

    # --- network ------------------------------------------------------------------------
    network: Network = "auto"
    """auto: atari (small below 36 pixels), mlp for vectors; nature, nips, small: shared layers; lstm; custom: yours."""
    lstm_units: Annotated[int, Range(0, 65_536)] = 0
    """Size of the hidden state of network lstm (units; 0 = 256 for images, 16 for vectors)."""
    normalize_obs: bool = True
    """Normalise images by a running mean and deviation per pixel (lstm: per frame); else divide them by 256."""
    precision: Precision = "auto"
    """Compute precision; auto: bfloat16 where it is native, float32 for mlp, lstm, custom. Parameters stay float32."""

    # --- learning -----------------------------------------------------------------------
    rollout_steps: Annotated[int, Range(1, 100_000)] = 32
    """Length of a rollout (steps per environment)."""
    num_minibatches: Annotated[int, Range(1, 10_000)] = 10
    """Minibatches per rollout and epoch, one optimiser step each (count; whole environments: at most num_envs)."""
    shuffle: bool = True
    """Learn from single decisions in random order, else (with a recurrent network: always) from whole environments."""
    epochs: Annotated[int, Range(1, 1000)] = 3
    """Times each rollout is learned from, with importance ratios clipped at 1 (count)."""
    sliding_batch: Annotated[int, Range(0, 1_000_000)] = 0
    """Learn from n-step windows that slide over the episodes, n = rollout_steps (windows per minibatch; 0 = off)."""
    gamma: Annotated[float, Range(0.0, 1.0)] = 0.99
    """Discount factor (0 to 1)."""
    gae_lambda: Annotated[float, Range(0.0, 1.0)] = 0.95
    """Lambda of the lambda-return; 1 gives the longest n-step return in the rollout (0 to 1)."""
    learning_rate: Annotated[float, Range(0.0, 10.0, above=True)] = 0.001
    """Step size of the optimiser; also --lr (per update)."""
    lr_final: Annotated[float, Range(0.0, 1.0)] = 0.1
    """Learning rate at the end of its linear schedule, and after it (share of learning_rate; 1 = constant)."""
    schedule_end: Annotated[float, Range(0.0, 1.0, above=True)] = 0.3
    """Where the schedules of learning_rate and entropy_coef end (share of total_env_steps)."""
    optimizer: Optimizer = "adam"
    """Optimiser of the network's parameters."""
    adam_eps: Annotated[float, Range(0.0, 1.0, above=True)] = 1e-4
    """Epsilon in Adam's denominator (gradient units)."""
    rmsprop_decay: Annotated[float, Range(0.0, 1.0)] = 0.99
    """Smoothing constant of RMSprop's mean of squared gradients (per update, 0 to 1)."""
    rmsprop_eps: Annotated[float, Range(0.0, 1.0, above=True)] = 1e-5
    """Epsilon in RMSprop's denominator (gradient units; squared with rmsprop_eps_inside)."""
    rmsprop_eps_inside: bool = False
    """Add rmsprop_eps under the square root, as in the A3C paper."""
    entropy_coef: Annotated[float, Range(0.0, 100.0)] = 0.02
    """Weight of the entropy bonus in the loss (per nat)."""
    entropy_final: Annotated[float, Range(0.0, 1.0)] = 0.1
    """Weight of the entropy bonus at the end of its schedule, and after it (share of entropy_coef; 1 = constant)."""
    entropy_hold: Annotated[float, Range(0.0, 1.0)] = 0.4
    """Share of the schedule before entropy_coef begins to fall, linearly (0 to 1)."""
    exploration_noise: Annotated[float, Range(0.0, 100.0)] = 0.0
    """Normal noise on the logits, per environment and rollout (standard deviation in nats; 0 = off)."""
    exploration_rewards: Annotated[int, Range(1, 10**15)] = 1000
    """exploration_noise falls linearly to 0 over this many decisions with a reward other than 0 (count)."""
    value_coef: Annotated[float, Range(0.0, 100.0)] = 0.5
    """Weight of the squared value error in the loss (per squared return)."""
    log_eps: Annotated[float | None, Range(0.0, 1.0)] = None
    """Use log(pi + log_eps) in the policy gradient, against policy lag (0 to 1; None = 1e-6 for ga3c, else 0)."""
    max_grad_norm: Annotated[float, Range(0.0, 1e9)] = 0.5
    """Clip the gradient's global L2 norm to this (gradient units; 0 = no clipping)."""

    # --- run ----------------------------------------------------------------------------
    total_env_steps: Annotated[int, Range(1, 10**15)] = 1_000_000
    """Length of the run (decisions of all environments)."""
    stop_after: Annotated[int, Range(0, 10**15)] = 0
    """Stop early, as if interrupted, once the run is this long; --resume continues it (env_steps; 0 = off)."""
    target_score: Annotated[float | None, Range(-1e12, 1e12)] = None
    """Stop when the mean score of the last 100 episodes reaches this (points; None = 18 for Pong, else never)."""
    seed: Annotated[int, Range(0, 2_000_000_000)] = 0
    """Seed of environments, network and sampling (integer, 0 or more)."""
    cuda: bool = False
    """Act and learn on the GPU (a3c runs on the CPU only)."""
    cuda_graphs: bool = True
    """Use CUDA graphs (a2c on one GPU with adam and shuffled minibatches; not for lstm, custom or sliding_batch)."""
    deterministic: bool = False
    """Use only operations that PyTorch calls deterministic; slower on a GPU (a2c)."""
    threads: Annotated[int, Range(0, 1024)] = 0
    """Compute threads, which share environments and minibatches (count; 0 = 1 per core; a GPU: at most 2; a3c: 1)."""
    env_timeout: Annotated[float, Range(0.0, 86_400.0, above=True)] = 60.0
    """Maximum wait for a step of an environment process, or for a rollout of an a3c or ga3c worker (seconds)."""
    max_worker_restarts: Annotated[int, Range(0, 1_000_000)] = 3
    """Maximum number of restarts after failures of environments, in a row without progress (count)."""
    run_dir: Path | None = None
    """Directory that the run is written to (path; None = runs/ENV-PRESET-SEED-TIME)."""
    resume: Path | None = None
    """Run directory to continue from, at its latest checkpoint (path)."""
    checkpoint_every: Annotated[int, Range(1, 10**15)] = 100_000
    """Interval between checkpoints (env_steps)."""
    keep_policy_every: Annotated[int, Range(0, 10**15)] = 0
    """Interval between policy files that are kept, in policies/ of the run directory (env_steps; 0 = off)."""
    eval_every: Annotated[int, Range(0, 10**15)] = 0
    """Interval between policies evaluated in another process, for evaluations.csv (env_steps; 0 = off)."""
    eval_episodes: Annotated[int, Range(1, 100_000)] = 10
    """Episodes of each of these evaluations (count)."""
    log_every: Annotated[float, Range(0.0, 86_400.0, above=True)] = 5.0
    """Interval between progress lines and rows of metrics.csv (seconds)."""
    wandb: bool = False
    """Send the rows of metrics to Weights & Biases, too (needs a2c[wandb])."""
    progress: bool = True
    """Show a live progress display (plain lines where the output is not a terminal)."""

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if isinstance(value, Real) and not isinstance(value, bool):  # NumPy's numbers, which JSON does not know
                object.__setattr__(self, name, int(value) if isinstance(value, Integral) else float(value))
        for name in ("run_dir", "resume"):
            value = getattr(self, name)
            if value is not None:
                if not isinstance(value, str | Path) or value == "":
                    raise ValueError(f"{name} must be a path, got {value!r}")
                try:
                    str(value).encode()
                except UnicodeEncodeError:  # torch and TensorBoard write no other path
                    raise ValueError(f"{name} must be a path in UTF-8, got {str(value)!r}") from None
                object.__setattr__(self, name, Path(os.path.expanduser(value)))
        check(self)
        check_choice("preset", self.preset, tuple(PRESETS))
        changes = PRESETS[self.preset]
        if changes and not any(getattr(self, name) == value for name, value in changes.items()):
            raise ValueError(f"preset must be resolved by Config.from_preset({self.preset!r}), got none of its values")
        most = self.num_envs * (self.rollout_steps if self.shuffle and self.network != "lstm" else 1)
        object.__setattr__(self, "num_minibatches", min(self.num_minibatches, most))

    @property
    def session_end(self) -> int:
        """Decisions at which training stops, unless the target or a signal ends it before."""
        return min(self.total_env_steps, self.stop_after or self.total_env_steps)

    def to_json(self) -> str:
        """All settings as JSON text, which `from_json` reads back."""
        values = dataclasses.asdict(self)
        return json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in values.items()}, indent=2) + "\n"

    @staticmethod
    def from_preset(name: str, **settings: Any) -> Config:
        """The defaults, changed by the preset `name`, then by `settings`; ValueError for a bad name or value."""
        check_choice("preset", name, tuple(PRESETS))
        check_names("setting", settings, {field.name for field in dataclasses.fields(Config)} - {"preset"})
        return Config(**{"preset": name, **PRESETS[name], **settings})

    @staticmethod
    def from_json(text: str) -> Config:
        """The settings that `to_json` wrote; ValueError names an unknown field or a bad value."""
        try:
            values: Any = json.loads(text)
        except RecursionError:
            raise ValueError("config must be a JSON object, got one nested too deeply") from None
        if not isinstance(values, dict):
            raise ValueError(f"config must be a JSON object, got {type(values).__name__}")
        check_names("config field", values, {field.name for field in dataclasses.fields(Config)})
        return Config(**values)


def field_docs() -> dict[str, str]:
    """What each setting means, by its name: the strings below the fields of `Config`."""
    module = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    settings = next(node for node in module.body if isinstance(node, ast.ClassDef))
    texts = (ast.literal_eval(node.value) for node in settings.body if isinstance(node, ast.Expr))
    next(texts)  # of the class
    return dict(zip((field.name for field in dataclasses.fields(Config)), texts, strict=True))


def _explain_fields() -> None:
    """Make `help(a2c.Config)` explain each field."""
    lines = [f"    {name}: {text}" for name, text in field_docs().items()]
    Config.__doc__ = "\n".join([str(Config.__doc__), "", "    Fields:", *lines])


with suppress(OSError, SyntaxError, ValueError):  # installed without its source
    _explain_fields()

"""The command line: `python train.py`, `a2c train`, `a2c evaluate`. No torch until a command runs.

A bad value ends the command before any process starts, with one line that names the field,
the rule and the value, and exit code 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from a2c.config import Algorithm, Config
from a2c.rules import nearest

T = TypeVar("T")
USAGE = """usage: a2c COMMAND [OPTIONS]

commands:
  train      train an agent
  evaluate   play a trained policy and print its scores
  compare    train a2c, a3c and ga3c on the same game and draw them side by side

`a2c COMMAND --help` explains every option."""


@dataclass(frozen=True)
class Evaluate:
    """Play a trained, frozen policy and print the true score of its games."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory (path)."""
    episodes: int = 30
    """Games to play (count)."""
    checkpoint: str = "latest.pt"
    """Checkpoint inside the run directory: latest.pt or best.pt (file name)."""
    greedy: bool = False
    """Take the most likely action instead of sampling from the policy."""
    seed: int = 10_000
    """Seed of environments and sampling (integer, 0 or more)."""
    cuda: bool = False
    """Use the GPU."""


@dataclass(frozen=True)
class Compare:
    """Train several algorithms on the same game with the same flags, budget and seeds, and draw them side by side.

    All other flags are those of `a2c train`. The same command goes on with a comparison that was stopped.
    """

    out: Annotated[Path, tyro.conf.Positional]
    """Directory of the comparison: a run directory per algorithm and seed, compare.csv, compare.png (path)."""
    algorithms: tuple[Algorithm, ...] = ("a2c", "a3c", "ga3c")
    """What to compare (names)."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the runs (integers, 0 or more)."""


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of the console script `a2c`."""
    args = list(sys.argv[1:] if args is None else args)
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "train": partial(train, prog="a2c train"),
        "evaluate": evaluate,
        "compare": compare,
    }
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] not in commands:
        return _refuse(
            f"command must be one of {', '.join(commands)}, got {args[0]!r}; {nearest(args[0], [*commands])}"
        )
    return commands[args[0]](args[1:])


def train(args: Sequence[str] | None = None, prog: str = "train.py") -> int:
    """Parse the flags and run one training; returns the exit code."""
    args = list(sys.argv[1:] if args is None else args)
    try:
        config = parse_config(args, prog)
        # Waiting OpenMP threads would spin on the cores that the emulators need.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from a2c.games import WorkerError
        from a2c.trainer import Trainer

        trainer = Trainer(config)
        trainer.claim()
        with contextlib.suppress(OSError):  # a log on a full disk
            print(f"run directory {trainer.run_dir}\n{trainer.config.to_json()}", end="", flush=True)
    except ValueError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    try:
        return trainer.run()
    except ValueError as error:
        return _refuse(str(error))
    except WorkerError as error:
        print(error.trace, end="", file=sys.stderr)
        return _refuse(str(error), 1)
    except (FloatingPointError, OSError) as error:
        return _refuse(str(error), 1)


def evaluate(args: Sequence[str] | None = None) -> int:
    """Parse the flags, play the games, print mean, standard deviation, min and max."""
    try:
        options = parse(Evaluate, "a2c evaluate", args)
        from a2c.evaluation import evaluate as play

        scores = play(
            options.run,
            options.episodes,
            checkpoint=options.checkpoint,
            greedy=options.greedy,
            seed=options.seed,
            cuda=options.cuda,
        )
    except ValueError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    print(
        f"{len(scores)} games of {options.run}: mean {scores.mean():.2f}, standard deviation {scores.std():.2f}, "
        f"min {scores.min():g}, max {scores.max():g}"
    )
    return 0


def compare(args: Sequence[str] | None = None) -> int:
    """Parse the flags, train what is missing, write compare.csv and compare.png, print the table."""
    args = list(sys.argv[1:] if args is None else args)
    try:
        options, flags = parse(Compare, "a2c compare", args, rest=True)
        for name in ("algorithm", "seed", "run-dir", "resume"):
            if _value_of(flags, f"--{name}") is not None:
                raise ValueError(f"{name} must be left out of a comparison, got {_value_of(flags, f'--{name}')}")
        for name in ("algorithms", "seeds"):
            values = getattr(options, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be at least one, none of them twice, got {' '.join(map(str, values))!r}")
        plan = {
            f"{algorithm}-{seed}": parse_config([*flags, "--algorithm", algorithm, "--seed", str(seed)], "a2c compare")
            for algorithm in options.algorithms
            for seed in options.seeds
        }
        from a2c.comparison import check_runs, report, summarise, train_all

        check_runs(options.out, plan)
        code = train_all(options.out, options.algorithms, options.seeds, flags)
        if code == 0:
            report(options.out, summarise(options.out, options.algorithms, options.seeds))
        return code
    except ValueError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(str(error), 1)
    except KeyboardInterrupt:
        return 130


def parse_config(args: Sequence[str], prog: str = "train.py") -> Config:
    """Flags to a Config: the run's own config on --resume, else the preset's, then every flag given."""
    default = Config.from_preset(_value_of(args, "--preset") or "default")
    resume = _value_of(args, "--resume")
    if resume is not None:
        if _value_of(args, "--preset") is not None:
            raise ValueError(f"preset must be left out when resume is set, got {_value_of(args, '--preset')}")
        path = Path(resume) / "config.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"resume must be a run directory with a config.json, got {resume!r} ({error})") from error
        default = replace(Config.from_json(text), run_dir=None, stop_after=0)
    return parse(Config, prog, args, default)


def parse(kind: type[T], prog: str, args: Sequence[str] | None, default: T | None = None, rest: bool = False) -> Any:
    """tyro's parser with its errors folded into one ValueError; --help and its exit pass through.

    `rest`: give back a pair, the second of it what `kind` does not know.
    """
    errors = io.StringIO()
    kwargs: dict[str, Any] = {"return_unknown_args": True} if rest else {}
    if default is not None:
        kwargs["default"] = default
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(kind, prog=prog, args=args, **kwargs)
    except SystemExit as stop:
        if not stop.code:
            raise
        flags = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(kind)]
        raise ValueError(_one_line(errors.getvalue(), flags)) from None


def _value_of(args: Sequence[str], flag: str) -> str | None:
    """The value that `args` gives to `flag`, before the other flags are read."""
    value = None
    for i, arg in enumerate(args):  # as tyro does, the last one counts
        if arg == flag and i + 1 < len(args):
            value = args[i + 1]
        elif arg.startswith(flag + "="):
            value = arg.split("=", 1)[1]
    return value


def _one_line(box: str, known: Sequence[str]) -> str:
    """The message inside tyro's box, without frame and advice, and the flag that was probably meant."""
    lines = [line.strip("│╭╮╰╯|+ ") for line in box.splitlines()[1:]]  # the first line is a title
    text = "\n".join("" if not line.strip("─- ") else line for line in lines).strip()
    message = " ".join(text.split("\n\n")[0].split("Got errors:")[0].split())
    message = message.removeprefix("Error parsing Config: ")
    unknown = [word.strip(",") for word in message.split() if word.startswith("--")]
    near: list[str] = []
    if "Unrecognized" in message and unknown:
        near = [flag for flag in known if flag.startswith(unknown[0])]
        near = near or difflib.get_close_matches(unknown[0], known, n=1)
    return f"{message}; did you mean {near[0]}?" if near else message


def _refuse(message: str, code: int = 2) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code

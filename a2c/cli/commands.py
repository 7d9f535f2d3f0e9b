"""The commands: `python train.py`, `a2c train`, `evaluate`, `record`, `compare`. No torch until one runs.

A bad value ends the command before any process starts, with one line that names the field,
the rule and the value, and exit code 2.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import ParamSpec

from a2c.cli.flags import parse, parse_config, parse_known, value_of
from a2c.cli.options import Compare, Evaluate, RecordVideo
from a2c.config.validation import nearest

USAGE = """usage: a2c COMMAND [OPTIONS]

commands:
  train      train an agent
  evaluate   play a trained policy and print its scores
  record     film a game of a trained policy
  compare    train a2c, a3c and ga3c on the same game and draw them side by side

`a2c COMMAND --help` explains every option."""


NO_MEMORY = "(?i)out of memory|allocate memory|not enough memory|tried to allocate|ALLOC_FAILED"  # of torch
ADVICE = "take fewer environments, shorter rollouts, smaller batches or smaller frames"
P = ParamSpec("P")


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of the console script `a2c`."""
    args = list(sys.argv[1:] if args is None else args)
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "train": partial(train, prog="a2c train"),
        "evaluate": evaluate,
        "record": record,
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


def _refuse(message: str, code: int = 2) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _in_one_line(command: Callable[P, int]) -> Callable[P, int]:
    """Bad values end a command with one line and exit code 2, what fails or is refused here with 1, Ctrl-C with 130."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except ValueError as error:
            return _refuse(str(error))
        except (OSError, FloatingPointError) as error:
            return _refuse(str(error), 1)
        except (MemoryError, RuntimeError) as error:
            from a2c.processes.errors import WorkerError

            if isinstance(error, WorkerError):
                return _refuse(str(error), 1)
            if not isinstance(error, MemoryError) and not re.search(NO_MEMORY, str(error)):
                raise
            return _refuse(f"out of memory: {ADVICE} ({str(error)[:200]})", 1)
        except KeyboardInterrupt:
            return 130

    return run


@_in_one_line
def train(args: Sequence[str] | None = None, prog: str = "train.py") -> int:
    """Parse the flags and run one training; returns the exit code."""
    config = parse_config(list(sys.argv[1:] if args is None else args), prog)
    from a2c.processes.errors import WorkerError
    from a2c.processes.signals import leave
    from a2c.run.trainer import Trainer

    trainer = Trainer(config)
    trainer.claim()
    with contextlib.suppress(OSError):  # a log on a full disk
        print(f"run directory {trainer.run_dir}\n{trainer.config.to_json()}", end="", flush=True)
    try:
        return trainer.run()
    except WorkerError as error:
        print(error.trace, end="", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        return leave(130)


@_in_one_line
def evaluate(args: Sequence[str] | None = None) -> int:
    """Parse the flags, play the games, print mean, standard deviation, min and max."""
    options = parse(Evaluate, "a2c evaluate", args)
    from a2c.metrics.files import exact
    from a2c.tools.evaluate import evaluate as play

    scores = play(
        options.run,
        options.episodes,
        checkpoint=options.checkpoint,
        greedy=options.greedy,
        seed=options.seed,
        cuda=options.cuda,
    )
    print(
        f"{len(scores)} games of {options.run}: mean {scores.mean():.2f}, standard deviation {scores.std():.2f}, "
        f"min {exact(scores.min())}, max {exact(scores.max())}"
    )
    return 0


@_in_one_line
def record(args: Sequence[str] | None = None) -> int:
    """Parse the flags, play and film one game, print its score."""
    options = parse(RecordVideo, "a2c record", args)
    from a2c.metrics.files import exact
    from a2c.tools.record_video import record_video as play

    out = options.out or options.run / "game.mp4"
    video = play(options.run, out, checkpoint=options.checkpoint, greedy=options.greedy, seed=options.seed)
    whole = "one game" if video.ended else "the beginning of a game"
    print(f"{out}: {whole} of {options.run}, score {exact(video.score)}, {video.length:,} decisions")
    return 0


@_in_one_line
def compare(args: Sequence[str] | None = None) -> int:
    """Parse the flags, train what is missing, write compare.csv and compare.png, print the table."""
    args = list(sys.argv[1:] if args is None else args)
    options, flags = parse_known(Compare, "a2c compare", args)
    for name in ("algorithm", "seed", "run-dir", "resume"):
        if value_of(flags, f"--{name}") is not None:
            raise ValueError(f"{name} must be left out of a comparison, got {value_of(flags, f'--{name}')}")
    for name in ("algorithms", "seeds"):
        values = getattr(options, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} must be at least one, none of them twice, got {' '.join(map(str, values))!r}")
    plan = {
        f"{algorithm}-{seed}": parse_config([*flags, "--algorithm", algorithm, "--seed", str(seed)], "a2c compare")
        for algorithm in options.algorithms
        for seed in options.seeds
    }
    from a2c.tools.compare import check_runs, report, summarise, train_all

    check_runs(options.out, plan)
    code = train_all(options.out, options.algorithms, options.seeds, flags)
    if code == 0:
        report(options.out, summarise(options.out, options.algorithms, options.seeds))
    return code

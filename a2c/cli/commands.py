"""The commands: `python train.py`, `a2c train`, `evaluate`, `record`, `export`, `compare`, `sweep`, `plot`,
`report`, `watch`.

No torch is imported before one runs.

A bad value ends a command before any process starts: exit code 2 and one line on stderr that names the field, the
rule and the value.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

from a2c import __version__
from a2c.cli.flags import parse_command, parse_config
from a2c.cli.options import Compare, Evaluate, Export, Options, Plot, RecordVideo, Report, Sweep, Watch
from a2c.config.config import Config
from a2c.processes.errors import RankError, WorkerError, is_out_of_memory, reported_elsewhere
from a2c.processes.exits import exit_on_sigterm, exit_with, flush_or_drop_output, flushed_output
from a2c.processes.place import find_place

PATIENCE = 10.0  # seconds that a rank waits for the rank that prints the error
ADVICE = "use fewer environments, shorter rollouts, smaller minibatches or smaller frames"
# `python -m a2c`, stopped when the comparison that started it has ended, however that happened.
UNTIL_INPUT_CLOSES = (
    "import sys, a2c.cli.commands, a2c.processes.start as start; start.stop_with_input(); "
    "sys.exit(a2c.cli.commands.main())"
)
TRAIN = [sys.executable, "-P", "-c", UNTIL_INPUT_CLOSES, "train"]  # with the variables of `module_environ`
P = ParamSpec("P")


def _refuse(error: Exception, message: str = "", code: int = 2) -> int:
    """Print `error`, or the `message` instead, in one line; not what another rank of torchrun's reports."""
    if not reported_elsewhere(error):
        print(f"error: {' '.join((message or str(error)).split())}", file=sys.stderr)
    elif not isinstance(error, RankError):  # torchrun ends all ranks as soon as one leaves, also the one that prints
        time.sleep(PATIENCE)
    return code


def _in_one_line(command: Callable[P, int]) -> Callable[P, int]:
    """One line and an exit code instead of a traceback: 2 for a bad value, 1 for a failure, 130 for Ctrl-C."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        code = answer(*args, **kwargs)
        flush_or_drop_output()  # of a command that has failed
        # With torch 2.13, an exit of ranks that had been connected may abort in a destructor of C++.
        return exit_with(code, at_once=True) if find_place().size > 1 else code

    def answer(*args: P.args, **kwargs: P.kwargs) -> int:
        with contextlib.suppress(AttributeError):  # there is no output, or one without an encoding
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # it may lack letters of a path
        try:
            with flushed_output():
                return command(*args, **kwargs)
        except ValueError as error:
            return _refuse(error)
        except BrokenPipeError:  # who read the output has ended, as in `a2c --help | head`
            return exit_with(1, at_once=True)
        except (OSError, FloatingPointError) as error:
            return _refuse(error, code=1)
        except KeyboardInterrupt:
            return exit_with(130)
        except Exception as error:
            if isinstance(error, MemoryError | RuntimeError) and is_out_of_memory(error):
                return _refuse(error, f"out of memory: {ADVICE} ({str(error)[:200]})", code=1)
            if isinstance(error, RankError | WorkerError) or reported_elsewhere(error):
                return _refuse(error, code=1)
            raise

    return run


@_in_one_line
def main(args: Sequence[str] | None = None) -> int:
    """Entry point of the console script `a2c`: runs the command and returns the exit code."""
    args = list(sys.argv[1:] if args is None else args)
    if args == ["--version"]:
        print(f"a2c {__version__}")
        return 0
    options, rest = parse_command(args)
    if isinstance(options, Compare):
        return _compare(args, options, rest)
    return RUN[type(options)](options)


@_in_one_line
def train(args: Sequence[str] | None = None) -> int:
    """Entry point of `train.py`: runs one training and returns the exit code."""
    return _train(parse_config(sys.argv[1:] if args is None else args))


def _train(config: Config) -> int:
    from a2c.run.checkpoint import LATEST
    from a2c.run.trainer import Trainer

    trainer = Trainer(config)
    trainer.claim()
    if trainer.ranks.rank == 0:
        with contextlib.suppress(OSError):  # the output may go to a full disk
            print(*trainer.introduction(), sep="\n", flush=True)
    try:
        return trainer.run().exit_code
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, WorkerError) and not reported_elsewhere(error):
            print(error.trace, end="", file=sys.stderr)
        if not is_out_of_memory(error):
            raise
        latest = trainer.run_dir / LATEST
        kept = f"the last checkpoint is kept: {latest}" if latest.exists() else "no checkpoint was written yet"
        return _refuse(error, f"out of memory: {ADVICE}; {kept} ({str(error)[:200]})", code=1)
    finally:
        flush_or_drop_output()  # the files of a run are its result, not what it prints


def _evaluate(options: Evaluate) -> int:
    """Print protocol and results, or everything as JSON; on a terminal, a bar meanwhile."""
    import torch

    from a2c.metrics.console import episode_bar
    from a2c.tools.evaluate import as_json, describe, play

    if options.cuda and not torch.cuda.is_available():
        print("--cuda: torch finds no GPU here, so the CPU is used", file=sys.stderr)
    with exit_on_sigterm(), episode_bar(options.episodes) as watch:
        evaluation = play(
            options.run_dir,
            options.episodes,
            checkpoint=options.checkpoint,
            greedy=options.greedy,
            seed=options.seed,
            cuda=options.cuda,
            watch=watch,
        )
    summary = evaluation.summary()
    print(as_json(summary) if options.json else "\n".join(describe(summary)))
    return 0


def _record(options: RecordVideo) -> int:
    """Record episodes and print their scores; on a terminal, a bar meanwhile."""
    from a2c.metrics.console import episode_bar
    from a2c.tools.record_video import describe, record_video

    folder = options.run_dir.parent if options.run_dir.is_file() else options.run_dir
    out = options.out or folder / ("episode.gif" if options.tensorboard else "episode.webp")
    if options.tensorboard:
        from a2c.tools.tensorboard_video import check_gif, log_video

        check_gif(out, options.run_dir)
    with exit_on_sigterm(), episode_bar(max(options.episodes, options.best_of)) as watch:
        episodes = record_video(
            options.run_dir,
            out,
            checkpoint=options.checkpoint,
            greedy=options.greedy,
            seed=options.seed,
            episodes=options.episodes,
            best_of=options.best_of,
            max_length=options.max_length,
            overlay=options.overlay,
            watch=watch,
        )
    print(f"{out}: {describe(episodes, options.best_of)}")
    if options.tensorboard:
        print(f"{log_video(options.run_dir, out, episodes[0].env_steps)}: the video, for TensorBoard")
    return 0


def _export(options: Export) -> int:
    """Write a policy file or an ONNX model and print its size."""
    from a2c.tools.export import export

    policy = export(options.run_dir, options.out, checkpoint=options.checkpoint, half=options.half)
    size = options.out.stat().st_size
    print(f"{options.out}: policy of {policy.checkpoint} after {policy.env_steps:,} env_steps, {size / 1e3:,.0f} kB")
    return 0


def _plot(options: Plot) -> int:
    """Draw learning curves and print what the picture shows."""
    from a2c.tools.plot import plot

    plotted = plot(options.runs, options.out, options.x, options.metric, options.iqm, options.interval)
    runs = f"{plotted.runs} {'run' if plotted.runs == 1 else 'runs'}"
    settings = f" with {plotted.groups} settings" if plotted.groups > 1 else ""
    print(f"{options.out}: {options.metric} of {runs}{settings}")
    if left_out := [str(run_dir) for run_dir in plotted.left_out]:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        print(f"left out, no value yet: {', '.join(left_out[:3])}{more}")
    if repeated := [str(run_dir) for run_dir in plotted.repeated]:
        print(f"counted though they repeat the settings and seed of another run: {', '.join(repeated)}")
    return 0


def _report(options: Report) -> int:
    """Write a report and print its size."""
    from a2c.tools.report import write_report

    size = write_report(options.run_dir, options.out)
    print(f"{options.out}: report of {options.run_dir}, {size / 1e6:.1f} MB")
    return 0


def _watch(options: Watch) -> int:
    """Serve the page of a run until Ctrl-C."""
    from a2c.tools.watch import watch

    watch(options.run_dir, options.port, options.open)
    return 0


def _compare(args: Sequence[str], options: Compare, flags: Sequence[str]) -> int:
    """Train what is missing, write and print the results; `args` are the whole command's, `flags` those of `train`."""
    from a2c.cli.grid import make_runs

    runs = make_runs(options, flags)
    from a2c.tools.compare import compare
    from a2c.tools.sweep import sweep

    given = (options.out, runs, TRAIN, options.jobs, shlex.join(["a2c", *args]))
    try:
        return sweep(*given, options.budget) if isinstance(options, Sweep) else compare(*given)
    finally:
        flush_or_drop_output()  # as for a training


RUN: dict[type[Options], Callable[[Any], int]] = {  # what runs the options of a command; `_compare` takes more
    Config: _train,
    Evaluate: _evaluate,
    RecordVideo: _record,
    Export: _export,
    Plot: _plot,
    Report: _report,
    Watch: _watch,
}

"""Train several settings over several seeds, and compare them: tables, one picture, what they were made with."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from a2c.run.about import comparison_facts, write_about
from a2c.run.run_dir import RunLock
from a2c.tools.compare_plot import draw
from a2c.tools.jobs import FAILED, Jobs, last_line, print_line
from a2c.tools.runs import Run, check_runs, resolved
from a2c.tools.summary import OUT_OF_TIME, print_table, row_of, summarise, write_csv


def compare(out: Path, runs: Sequence[Run], train: Sequence[str], jobs: int, command: str) -> int:
    """Train what is missing of `runs` in `out`, `jobs` at a time, then write and print the results of all.

    `train` starts one training, given flags; `command` is the command line, for about.json. Returns 0; 1 where a run
    has failed, which counts as a miss unless it had reached the target; 128 + the number of the signal that stopped it.
    ValueError before anything starts if a run cannot be made, `out` holds another run in its place or one that has been
    trained further, or is in use.
    """
    with opened(out, runs, command, jobs) as runs:
        work = Jobs(out, train)
        work.train_all(runs, jobs)
        if len(work.codes) < len(runs):
            finished = f"{sum(code == 0 for code in work.codes.values())} of {len(runs)} runs finished"
            print_line(f"stopped by {work.request.name}, {finished}; the same command continues")
            return 128 + work.request.number
        report(out, runs, work.codes)
        return int(any(work.codes.values()))


@contextmanager
def opened(out: Path, runs: Sequence[Run], command: str, jobs: int) -> Iterator[Sequence[Run]]:
    """Lock `out` for the `runs`, write about.json where one of them is missing; yields them `resolved`."""
    runs = resolved(runs)
    check_runs(out, runs)
    lock = RunLock(out)
    try:
        lock.take()
    except ValueError as error:
        raise ValueError(str(error).replace("run_dir", "out", 1)) from error
    try:
        if not all(map(Jobs(out, ()).is_finished, runs)):
            write_about(out / "about.json", comparison_facts(command, jobs))
        yield runs
    finally:
        lock.release()


def report(out: Path, runs: Sequence[Run], codes: dict[str, int]) -> None:
    """Write compare.csv, summary.csv and compare.png; print the table and the runs that failed.

    A run whose tables cannot be read counts as failed, in `codes` too.
    """
    settings = list(dict.fromkeys(run.setting for run in runs))
    runs = sorted(runs, key=lambda run: settings.index(run.setting))
    rows, unreadable = [], dict[str, str]()
    for run in runs:
        try:
            rows.append(row_of(out, run, codes[run.name]))
        except (OSError, ValueError) as error:  # its training has ended well, but a table is missing or damaged
            codes[run.name], unreadable[run.name] = FAILED, str(error)
            rows.append(row_of(out, run, FAILED))
    summaries = summarise(runs, rows)
    write_csv(out / "compare.csv", rows)
    write_csv(out / "summary.csv", summaries)
    try:
        draw(out, runs, summaries)
    except OSError:
        raise
    except Exception as error:  # a matplotlibrc that asks for LaTeX, a score too large to draw, and so on
        print(f"compare.png could not be drawn: {error}", file=sys.stderr)
    print_table(summaries)
    for run in runs:
        if run.name in unreadable:
            print(f"{run.name} has no results: {unreadable[run.name]}; remove its directory to train it again")
        elif (code := codes[run.name]) not in (0, OUT_OF_TIME):
            log = out / f"{run.name}.log"
            print(
                f"{run.name} failed with exit status {code}: {last_line(log)} (see {log}); the same command retries it"
            )

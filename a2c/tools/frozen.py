"""The policies that a run has kept, played one after the other until one reaches the target. No torch until then."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from a2c.metrics.files import CsvTable, read_table
from a2c.processes.start import stop_with_input

EPISODES = 30  # that each policy plays
COLUMNS = ("env_steps", "episodes", "mean", "standard_deviation", "min", "max")  # of evaluations.csv
CODE = "import sys; from a2c.tools.frozen import main; sys.exit(main(*sys.argv[1:]))"


def command(run_dir: Path, target: float, threads: int) -> list[str]:
    """The command line of a process that evaluates what `to_evaluate` returns."""
    return [sys.executable, "-c", CODE, str(run_dir), str(target), str(threads)]


def main(run_dir: str, target: str, threads: str) -> int:
    """Entry point of that process, which ends when its standard input is closed."""
    stop_with_input()
    evaluate_kept(Path(run_dir), float(target), int(threads))
    return 0


def evaluate_kept(run_dir: Path, target: float, threads: int = 0) -> None:
    """Evaluate the run's kept policies in the order of their decisions, until a mean score is `target` or above.

    A row of evaluations.csv is written after each, so that a call continues where another was stopped. Raises what
    `evaluate` raises.
    """
    from a2c.tools.evaluate import evaluate

    table = CsvTable(run_dir / "evaluations.csv", COLUMNS, keep_until=_last(run_dir))
    for path in to_evaluate(run_dir, target):
        scores = evaluate(run_dir, EPISODES, checkpoint=f"{path.parent.name}/{path.name}", threads=threads)
        row = (int(path.stem), len(scores), scores.mean(), scores.std(), scores.min(), scores.max())
        table.add([row])
        print(", ".join(f"{name} {value:g}" for name, value in zip(COLUMNS, row, strict=True)), flush=True)
        if scores.mean() >= target:
            return


def to_evaluate(run_dir: Path, target: float) -> list[Path]:
    """Kept policies after the last that was evaluated, in the order of their decisions; none once one reached `target`.
    """
    if reached(run_dir, target) is not None:
        return []
    last, kept = _last(run_dir), (run_dir / "policies").glob("*.pt")
    return sorted((path for path in kept if path.stem.isdecimal() and int(path.stem) > last), key=lambda p: int(p.stem))


def reached(run_dir: Path, target: float) -> int | None:
    """Decisions of the first kept policy whose mean score is `target` or above; None where there is none so far."""
    return next((steps for steps, mean in _rows(run_dir) if mean >= target), None)


def _last(run_dir: Path) -> int:
    return max((steps for steps, _ in _rows(run_dir)), default=-1)


def _rows(run_dir: Path) -> Sequence[tuple[int, float]]:
    """env_steps and mean of the policies that were evaluated."""
    try:
        table = read_table(run_dir / "evaluations.csv", ("env_steps", "mean"))
    except FileNotFoundError:
        return []
    return [(int(steps), float(mean)) for steps, mean in zip(*table.values(), strict=True)]

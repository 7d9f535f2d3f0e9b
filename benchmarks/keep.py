"""Copy what results/ keeps of a comparison: tables, picture, and of every run its settings, episodes and metrics.

    python benchmarks/keep.py runs/results/NAME results/NAME

Of a game also the published policy, its evaluation and its video. Checkpoints, logs and event files stay behind.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

FILES = ("about.json", "compare.csv", "summary.csv", "compare.png")
OF_A_GAME = ("latest.pt", "evaluation.json", "film.webp")  # beside the tables, where commands.sh has made them
OF_A_RUN = ("config.json", "episodes.csv", "metrics.csv", "evaluations.csv")  # not every run has all


def keep(out: Path, kept: Path) -> None:
    """Copy the comparison `out` to `kept`, in place of an earlier one; ValueError where `out` is not finished."""
    if missing := [name for name in FILES if not (out / name).is_file()]:
        raise ValueError(f"out must be a finished comparison, got {out} without {', '.join(missing)}")
    if kept.exists():
        if not all((kept / name).is_file() for name in FILES[:2]):
            raise ValueError(f"kept must be a new directory or an earlier comparison, got {kept}")
        shutil.rmtree(kept)
    runs = [path for name in OF_A_RUN for path in out.glob(f"*/seed-*/{name}")]
    for path in [*(out / name for name in FILES), *filter(Path.is_file, (out / name for name in OF_A_GAME)), *runs]:
        copy = kept / path.relative_to(out)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def main() -> None:
    """Keep the comparison that the command line names."""
    parser = argparse.ArgumentParser(description="Copy what results/ keeps of a comparison.")
    parser.add_argument("out", type=Path, help="directory that `a2c compare` wrote")
    parser.add_argument("kept", type=Path, help="directory to write, new or of an earlier comparison")
    try:
        keep(**vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

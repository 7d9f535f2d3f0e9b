"""What the benchmarks share: timed windows, memory, a console."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console


def check_windows(seconds: float, rounds: int) -> None:
    """Raise ValueError for windows of no length, or for no windows."""
    if seconds <= 0:
        raise ValueError(f"seconds must be above 0, got {seconds}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")


def window(stage: Callable[[], int], seconds: float) -> tuple[int, float]:
    """Call `stage`, which returns its decisions, for at least `seconds`: (decisions, seconds) of whole calls."""
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        steps += stage()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return steps, time.perf_counter() - began


def tree_memory(root: int) -> tuple[float, float]:
    """Memory of a process and all its descendants: (PSS, RSS) in MB.

    PSS shares every page among the processes that map it, so its sum counts each page once; the sum of RSS
    counts shared pages once per process. Without PSS in the kernel, RSS is used; without /proc, zeros.
    """
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended in the meantime
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    tree = [root]
    for pid in tree:  # grows while it is read
        tree += parents.get(pid, [])
    pss = rss = 0
    for pid in tree:
        with suppress(OSError):
            own_rss = _kilobytes(Path(f"/proc/{pid}/status"), "VmRSS:")
            rss += own_rss
            rollup = Path(f"/proc/{pid}/smaps_rollup")
            pss += _kilobytes(rollup, "Pss:") if rollup.exists() else own_rss
    return pss / 1024, rss / 1024


def _kilobytes(path: Path, field: str) -> int:
    """The value of one `field` of a /proc file, 0 where it has none."""
    return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(field)), 0)


class PeakMemory:
    """Context manager: highest PSS and RSS (MB) of a process tree, sampled by a thread every `every` seconds."""

    def __init__(self, root: int, every: float = 0.25) -> None:
        self.root, self.every = root, every
        self.pss = self.rss = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        over = False
        while not over:
            over = self._over.wait(self.every)
            pss, rss = tree_memory(self.root)
            self.pss, self.rss = max(self.pss, pss), max(self.rss, rss)


def make_console() -> Console:
    """A console whose tables keep their shape in a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def run_benchmark(
    options_type: type[Any],
    description: str,
    measure: Callable[[Any, list[str]], dict[str, Any]],
    report: Callable[[dict[str, Any]], None],
    errors: tuple[type[Exception], ...] = (ValueError,),
) -> int:
    """Parse the flags, measure, print, write `--json`; returns the exit code: 2, and one line, if `measure` fails."""
    import tyro  # not with this module, which the contenders of compare_sb3.py import: their memory is measured

    try:
        options, rest = tyro.cli(options_type, description=description, return_unknown_args=True)
        figures = measure(options, list(rest))
    except errors as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0

"""The output of a run: a live panel on a terminal or in a notebook, elsewhere plain lines, and a table at the end."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from a2c.metrics.meters import WINDOW, StageTimer
from a2c.metrics.panel import Panel
from a2c.metrics.text import format_duration, format_score
from a2c.processes.signals import StopRequest

REDRAWN = 2  # times a second that the live panel is drawn
STOPPING = "stopping after this rollout, with a checkpoint; Ctrl-C again ends at once"


class QuietConsole(Console):
    """A console that ignores errors of its output, such as a closed pipe, a full disk or a letter that it lacks."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        with suppress(OSError, UnicodeError):
            super().print(*args, **kwargs)

    def on_broken_pipe(self) -> None:
        self.quiet = True


class QuietLive(Live):
    """A live display that no error ends, of its output or of what it draws: a run goes on without it."""

    def refresh(self) -> None:
        with suppress(Exception):
            super().refresh()


@contextmanager
def episode_bar(total: int) -> Iterator[Callable[[int, Sequence[float]], None]]:
    """A bar of `total` episodes on stderr, where that is a terminal; yields what updates it.

    The function takes the decisions and the scores so far.
    """
    console = QuietConsole(stderr=True, highlight=False)
    shown = (MofNCompleteColumn(), TextColumn("episodes, mean {task.fields[mean]}, {task.fields[decisions]} decisions"))
    off = not console.is_terminal or console.is_dumb_terminal
    bar = Progress(BarColumn(20), *shown, TimeElapsedColumn(), console=console, transient=True, disable=off)
    task = bar.add_task("", total=total, mean="-", decisions="0")

    def update(decisions: int, scores: Sequence[float]) -> None:
        mean = format_score(sum(scores) / len(scores)) if scores else "-"
        bar.update(task, completed=len(scores), mean=mean, decisions=f"{decisions:,}")

    with bar:
        yield update


class NotebookLive:
    """One output of a notebook's cell, drawn again by a thread; rich's own would ask for ipywidgets."""

    def __init__(self, draw: Callable[[], RenderableType]) -> None:
        self.draw, self.ended = draw, threading.Event()
        self.thread = threading.Thread(target=self._redraw, name="a2c-notebook", daemon=True)
        self.output: Any = None  # IPython's handle

    def start(self) -> None:
        """Show the output and begin to redraw it."""
        display = import_module("IPython.display").display  # every notebook has it; type checkers elsewhere do not
        self.output = display(self.draw(), display_id=True)
        self.thread.start()

    def stop(self) -> None:
        """Empty the output; may be called twice."""
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()
        with suppress(Exception):
            self.output.update({"text/plain": ""}, raw=True)

    def _redraw(self) -> None:
        while not self.ended.wait(1 / REDRAWN):
            with suppress(Exception):
                self.output.update(self.draw())


class Display:
    """Shows rows of metrics: as a live panel on a terminal or in a notebook, as one line per row elsewhere."""

    def __init__(self, panel: Panel, timer: StageTimer, stop: StopRequest) -> None:
        """`timer`: wall time of the run; `stop`: once it is set, the panel says so."""
        self.panel, self.config, self.timer, self.stop = panel, panel.config, timer, stop
        self.console = QuietConsole(highlight=False)
        self.live: QuietLive | NotebookLive | None = None

    @property
    def on_terminal(self) -> bool:
        """Whether progress is shown on a terminal that can redraw."""
        return self.config.progress and self.console.is_terminal and not self.console.is_dumb_terminal

    def starting(self) -> AbstractContextManager[object]:
        """A bar that moves while the environments start, where there is a terminal for it."""
        if not self.on_terminal:
            return nullcontext()
        bar = Progress("starting", BarColumn(), TimeElapsedColumn(), console=self.console, transient=True)
        bar.add_task("", total=None)
        return bar

    def start(self) -> None:
        """Open the live panel, where there is a terminal or a notebook for it."""
        if self.on_terminal:
            settings: dict[str, Any] = {"console": self.console, "refresh_per_second": REDRAWN, "transient": True}
            self.live = QuietLive(get_renderable=self._draw, **settings)
            self.live.start()
        elif self.config.progress and self.console.is_jupyter:
            live = NotebookLive(self._draw)
            with suppress(Exception):  # no run ends because of its display; without one it prints lines
                live.start()
                self.live = live

    def show(self, row: dict[str, float]) -> None:
        """Show one row of METRICS."""
        self.panel.add(row)
        if self.live is None and self.config.progress:
            self.console.print(self.line(row), soft_wrap=True)

    def message(self, text: str) -> None:
        """Print one line above the panel, without a line break, so that a path in it can be copied."""
        self.console.print(text, soft_wrap=True, markup=False, emoji=False)

    def line(self, row: dict[str, float]) -> str:
        """One row as plain text."""
        total, left = self.config.session_end, self.panel.seconds_left(int(row["env_steps"]), row)
        mean, best = format_score(row["reward_100"]), format_score(row["best_reward_100"])
        return (
            f"{row['env_steps']:,}/{total:,} steps | {row['episodes']} episodes | mean {mean} best {best} | "
            f"{' '.join(self.panel.speeds(row))} | left {format_duration(left)} | "
            f"env {row['share_env']:.0%} act {row['share_act']:.0%} "
            f"learn {row['share_learn']:.0%}"
        )

    def close(self) -> None:
        """Remove the panel and give the terminal or the cell back."""
        if self.live is not None:
            with suppress(OSError):
                self.live.stop()

    def summary(self, row: dict[str, float], reason: str, finished: bool) -> None:
        """Print the table at the end of a run, why it ended, its directory, and how to continue if not `finished`."""
        table = Table(title=f"{self.config.env}: {reason}", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(overflow="fold")
        frames = row["env_steps"] * self.panel.frames_per_step
        table.add_row("environment steps", f"{row['env_steps']:,} ({frames:,} frames)")
        table.add_row("updates", f"{row['updates']:,}")
        table.add_row("episodes", f"{row['episodes']:,}")
        last = min(int(row["episodes"]), WINDOW) or WINDOW
        table.add_row(f"mean score of the last {last} episodes", format_score(row["reward_100"]))
        table.add_row(f"best mean of {WINDOW} episodes", format_score(row["best_reward_100"]))
        table.add_row("wall time", format_duration(row["seconds"]))
        table.add_row("mean speed", f"{row['env_steps'] / max(row['seconds'], 1e-9):,.0f} steps/s")
        self.console.print(table)
        self.message(f"run directory {self.panel.run_dir}")
        if not finished:
            self.message(f"to continue: a2c train --resume {shlex.quote(str(self.panel.run_dir))}")

    def _draw(self) -> RenderableType:
        return self.panel.render(self.timer.env_steps, self.timer.seconds, STOPPING if self.stop else "")

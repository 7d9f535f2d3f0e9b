"""The terminal output of a run: a live panel, or plain lines where there is no terminal, and a table at the end."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from a2c.config.config import Config
from a2c.metrics.files import format_number

SHARES = {"environments": "share_env", "acting": "share_act", "learning": "share_learn"}


class QuietConsole(Console):
    """A console that ignores errors of its output, such as a closed pipe or a full disk, instead of ending the run."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        with suppress(OSError):
            super().print(*args, **kwargs)

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Display:
    """Shows rows of metrics: as a live panel on a terminal, as one line per row elsewhere."""

    def __init__(self, config: Config, frames_per_step: int) -> None:
        self.config, self.frames_per_step = config, frames_per_step
        self.console = QuietConsole(highlight=False)
        self.live: Live | None = None

    def start(self) -> None:
        """Open the live panel, where there is a terminal for it."""
        if self.config.progress and self.console.is_terminal and not self.console.is_dumb_terminal:
            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            self.live.start()

    def show(self, row: dict[str, float]) -> None:
        """Show one row of METRICS."""
        if self.live is not None:
            with suppress(OSError):
                self.live.update(self._panel(row), refresh=True)
        elif self.config.progress:
            self.console.print(self.line(row), soft_wrap=True)

    def message(self, text: str) -> None:
        """Print one line above the panel, without a line break, so that a path in it can be copied."""
        self.console.print(text, soft_wrap=True, markup=False, emoji=False)

    def line(self, row: dict[str, float]) -> str:
        """One row as plain text."""
        total = self.config.total_env_steps
        mean, best = format_score(row["reward_100"]), format_score(row["best_reward_100"])
        return (
            f"{row['env_steps']:,}/{total:,} steps | {row['episodes']} episodes | mean {mean} best {best} | "
            f"{row['speed']:,.0f} steps/s {self._fps(row):,.0f} frames/s | "
            f"left {format_duration(self._left(row))} | env {row['share_env']:.0%} act {row['share_act']:.0%} "
            f"learn {row['share_learn']:.0%}"
        )

    def close(self) -> None:
        """Remove the panel and give the terminal back."""
        if self.live is not None:
            with suppress(OSError):
                self.live.stop()

    def summary(self, row: dict[str, float], reason: str, run_dir: Path) -> None:
        """Print the table at the end of a run, why it ended, and its directory."""
        table = Table(title=f"{self.config.env}: {reason}", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(overflow="fold")
        table.add_row("environment steps", f"{row['env_steps']:,} ({row['env_steps'] * self.frames_per_step:,} frames)")
        table.add_row("updates", f"{row['updates']:,}")
        table.add_row("episodes", f"{row['episodes']:,}")
        table.add_row("mean score of the last 100 episodes", format_score(row["reward_100"]))
        table.add_row("best mean of 100 episodes", format_score(row["best_reward_100"]))
        table.add_row("wall time", format_duration(row["seconds"]))
        table.add_row("mean speed", f"{row['env_steps'] / max(row['seconds'], 1e-9):,.0f} steps/s")
        self.console.print(table)
        self.message(f"run directory {run_dir}")

    def _panel(self, row: dict[str, float]) -> Table:
        config, grid = self.config, Table.grid(padding=(0, 2))
        goal = "" if config.target_score is None else f"   stops at {format_number(config.target_score)}"
        shares = [f"{name} {row[key]:.0%}" for name, key in SHARES.items()]
        left = format_duration(self._left(row))
        grid.add_row("steps", f"{row['env_steps']:,} of {config.total_env_steps:,}   left {left}")
        grid.add_row(
            "score", f"mean {format_score(row['reward_100'])}   best {format_score(row['best_reward_100'])}{goal}"
        )
        grid.add_row("episodes", f"{row['episodes']:,}   updates {row['updates']:,}")
        grid.add_row("speed", f"{row['speed']:,.0f} steps/s   {self._fps(row):,.0f} frames/s")
        grid.add_row("time in", "   ".join(shares))
        bar = ProgressBar(total=config.total_env_steps, completed=row["env_steps"], width=60)
        panel = Table.grid()
        for line in (f"{config.env}  {config.backend} x {config.num_envs}  seed {config.seed}", bar, grid):
            panel.add_row(line)
        return panel

    def _fps(self, row: dict[str, float]) -> float:
        return row["speed"] * self.frames_per_step

    def _left(self, row: dict[str, float]) -> float:
        return (self.config.total_env_steps - row["env_steps"]) / row["speed"] if row["speed"] else math.nan


def format_score(value: float) -> str:
    """A mean score with one decimal; a dash where it is NaN or infinite."""
    return f"{value:.1f}" if math.isfinite(value) else "-"


def format_duration(seconds: float) -> str:
    """h:mm:ss; a dash where `seconds` is NaN or infinite."""
    if not math.isfinite(seconds):
        return "-"
    whole = int(max(seconds, 0))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"

"""The live panel of a run on a terminal: how far it is, what it scores, where its time goes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from a2c.config.config import Config
from a2c.metrics.meters import WINDOW
from a2c.metrics.text import format_duration, format_number, format_score

SHARES = {"environments": "share_env", "acting": "share_act", "learning": "share_learn"}
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 60  # characters of the bar and of the sparkline
TREND = 20  # rows that the time to the target is estimated from


class Panel:
    """Keeps what the panel of one session shows; `render` may be called from another thread."""

    def __init__(self, config: Config, frames_per_step: int, run_dir: Path) -> None:
        self.config, self.frames_per_step, self.run_dir = config, frames_per_step, run_dir
        self.rows: deque[dict[str, float]] = deque(maxlen=TREND)
        self.means: list[tuple[float, float]] = []  # env_steps and reward_100 of every row

    def add(self, row: dict[str, float]) -> None:
        """Take in a row of METRICS."""
        self.rows.append(row)
        self.means.append((row["env_steps"], row["reward_100"]))

    def rewind(self, env_steps: int) -> None:
        """Drop what came after `env_steps`, which will be replayed."""
        self.rows = deque((row for row in self.rows if row["env_steps"] <= env_steps), maxlen=TREND)
        self.means = [(steps, mean) for steps, mean in self.means if steps <= env_steps]

    def seconds_left(self, env_steps: int, row: dict[str, float]) -> float:
        """Seconds from `env_steps` to the end of the session at the speed of `row`; NaN if it has none."""
        speed = row.get("speed")
        return (self.config.session_end - env_steps) / speed if speed else math.nan

    def speeds(self, row: dict[str, float]) -> tuple[str, str]:
        """Decisions and emulator frames per second, as text."""
        return f"{row['speed']:,.0f} steps/s", f"{row['speed'] * self.frames_per_step:,.0f} frames/s"

    def render(self, env_steps: int, seconds: float, note: str = "") -> Table:
        """The panel after `env_steps` decisions in `seconds`, newer than the last row; `note`: one more line."""
        config, rows, grid = self.config, tuple(self.rows), Table.grid(padding=(0, 2))
        row = rows[-1] if rows else {}
        left = self.seconds_left(env_steps, row)
        times = f"{format_duration(seconds)}   left {format_duration(left)}"
        grid.add_row("steps", f"{env_steps:,} of {config.session_end:,}")
        to_target = self._seconds_to_target(rows)
        grid.add_row("time", times + (f"   target in {format_duration(to_target)}" if to_target < left else ""))
        if row:
            grid.add_row("score", self._score(row))
            grid.add_row("", sparkline([mean for _, mean in self.means]))
            if "eval_score" in row:
                grid.add_row("evaluation", f"mean {format_score(row['eval_score'])}")
            length = f"   length {format_score(row['length_100'])}"
            grid.add_row("episodes", f"{row['episodes']:,}{length}   updates {row['updates']:,}")
            if "loss_total" in row:  # not before the first update
                grid.add_row("loss", f"{row['loss_total']:.4f}   entropy {row['entropy']:.2f} nats")
            grid.add_row("speed", "   ".join(self.speeds(row)))
            grid.add_row("time in", "   ".join(f"{name} {row[key]:.0%}" for name, key in SHARES.items()))
        grid.add_row("directory", Text(str(self.run_dir)))
        bar = ProgressBar(total=config.session_end, completed=env_steps, width=WIDTH)
        panel = Table.grid()
        for line in (Text(f"{config.env}, {config.algorithm}, seed {config.seed}"), bar, grid, note):
            panel.add_row(line)
        return panel

    def _score(self, row: dict[str, float]) -> str:
        target = self.config.target_score
        goal = "" if target is None else f"   stops at {format_number(target)}"
        if row["episodes"] < WINDOW:
            return f"mean {format_score(row['reward_100'])}   best: after {WINDOW} episodes{goal}"
        return f"mean {format_score(row['reward_100'])}   best {format_score(row['best_reward_100'])}{goal}"

    def _seconds_to_target(self, rows: Sequence[dict[str, float]]) -> float:
        """Seconds until the mean score is at the target, at the slope of the last rows; infinite if it is not."""
        target, rows = self.config.target_score, [row for row in rows if row["episodes"] >= WINDOW]
        if target is None or len(rows) < 3 or not all(math.isfinite(row["reward_100"]) for row in rows):
            return math.inf
        seconds, means = (np.array([row[name] for row in rows], dtype=np.float64) for name in ("seconds", "reward_100"))
        gained = float(np.mean((seconds - seconds.mean()) * (means - means.mean())))  # the slope times the variance
        rises = gained > 0.0 and target > means[-1]
        return round((target - means[-1]) * seconds.var() / gained, 3) if rises else math.inf


def sparkline(values: Sequence[float]) -> str:
    """Finite `values` as blocks between their lowest and their highest; of many, some that are evenly spaced."""
    finite = [value for value in values if math.isfinite(value)]
    picked = [finite[i] for i in np.linspace(0, len(finite) - 1, min(len(finite), WIDTH)).round().astype(int)]
    low, high = min(picked, default=0.0), max(picked, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in picked)

"""What a run leaves behind: config.json, metrics.csv, episodes.csv, TensorBoard events.

`METRICS` is the list of everything that is logged, with its meaning and unit.
"""

from __future__ import annotations

import csv
import io
import math
from collections import deque
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from tensorboardX import SummaryWriter
from torch import nn

from a2c.checkpoint import write_atomically
from a2c.config import Config
from a2c.games import Episode
from a2c.update import Update

METRICS = {
    "env_steps": "agent decisions summed over environments (count)",
    "seconds": "wall time of training, all sessions of the run together (s)",
    "updates": "optimiser steps (count)",
    "games": "finished games (count)",
    "reward": "score of the newest game (game points)",
    "reward_100": "mean score of the last 100 games (game points)",
    "best_reward_100": "highest reward_100 so far, once 100 games are finished (game points)",
    "speed": "agent decisions per second since the last row (1/s)",
    "advantage": "mean of return - value over the newest batch (return)",
    "values": "mean of the value head over the newest batch (return)",
    "batch_rewards": "mean bootstrapped return of the newest batch (return)",
    "loss_entropy": "-entropy_coef * entropy of the newest batch",
    "loss_policy": "policy gradient term of the newest batch",
    "loss_value": "mean squared error of the value head over the newest batch (squared return)",
    "loss_total": "loss_policy + value_coef * loss_value + loss_entropy",
    "entropy": "mean entropy of the policy (nats; log A is a uniform policy)",
    "ratio": "mean importance ratio of the newest batch, clipped at 1",
    "grad_l2": "L2 norm of the gradient before the clip",
    "grad_max": "largest size of one gradient entry before the clip",
    "grad_var": "variance of the gradient's entries before the clip",
    "learning_rate": "Adam's step size now",
    "share_env": "share of wall time in which environments step (0 to 1)",
    "share_act": "share of wall time in which the policy acts (0 to 1)",
    "share_learn": "share of wall time in which batches are learned (0 to 1)",
}
EPISODE_COLUMNS = ("env_steps", "seconds", "score", "length")
WINDOW = 100  # games in the moving mean that people compare


def run_directory(config: Config) -> Path:
    """Where the run lives: a resumed one's, a new or empty one; ValueError where others' files lie."""
    if config.resume is not None:
        return config.resume
    name = f"{config.env.replace('/', '-')}-{config.preset}-{config.seed}-{datetime.now():%Y%m%d-%H%M%S}"
    run_dir = config.run_dir or Path("runs") / name
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ValueError(f"run_dir must be new or empty, got {run_dir}; --resume {run_dir} goes on with a run")
    return run_dir


class Scores:
    """Running account of finished games: how many, the last 100 scores, the best mean."""

    def __init__(self) -> None:
        self.games = 0
        self.last: deque[float] = deque(maxlen=WINDOW)
        self.best_mean = -math.inf  # highest mean over a full window

    def add(self, scores: Iterable[float]) -> None:
        """Count finished games in order."""
        for score in scores:
            self.games += 1
            self.last.append(score)
            if self.full:
                self.best_mean = max(self.best_mean, self.mean)

    @property
    def mean(self) -> float:
        """Mean score of the last 100 games (of fewer at first, nan without any)."""
        return sum(self.last) / len(self.last) if self.last else math.nan

    @property
    def newest(self) -> float:
        """Score of the newest game (nan without any)."""
        return self.last[-1] if self.last else math.nan

    @property
    def full(self) -> bool:
        """True once the mean is over 100 games."""
        return len(self.last) == WINDOW

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"games": self.games, "last": list(self.last), "best_mean": self.best_mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.games, self.best_mean = state["games"], state["best_mean"]
        self.last = deque(state["last"], maxlen=WINDOW)


class RunLogger:
    """Writes the files of one run directory; rows are flushed as they are written.

    Create it after the environment workers: the TensorBoard writer starts a thread.
    """

    def __init__(self, run_dir: Path, config: Config, keep_until: int | None = None) -> None:
        """`keep_until`: on resume, drop rows beyond these env_steps, which will be lived again."""
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir / "config.json", lambda file: file.write(config.to_json().encode()))
        self._metrics = _open_csv(run_dir / "metrics.csv", tuple(METRICS), keep_until)
        self._episodes = _open_csv(run_dir / "episodes.csv", EPISODE_COLUMNS, keep_until)
        self._board = SummaryWriter(
            str(run_dir / "tensorboard"), flush_secs=10, purge_step=None if keep_until is None else keep_until + 1
        )

    def episodes(self, env_steps: int, seconds: float, games: list[Episode]) -> None:
        """One row of episodes.csv per finished game."""
        writer = csv.writer(self._episodes)
        for game in games:
            writer.writerow((env_steps, f"{seconds:.2f}", f"{game.score:g}", game.length))
        self._episodes.flush()

    def metrics(self, row: dict[str, float]) -> None:
        """One row of metrics.csv and one point per TensorBoard tag; the keys are those of METRICS."""
        text = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()}
        csv.DictWriter(self._metrics, tuple(METRICS)).writerow(text)
        self._metrics.flush()
        for name, value in row.items():
            if name != "env_steps" and math.isfinite(value):
                self._board.add_scalar(name, value, row["env_steps"])

    def close(self) -> None:
        """Flush and close every file."""
        self._metrics.close()
        self._episodes.close()
        self._board.close()


def learning_metrics(update: Update, net: nn.Module, config: Config) -> dict[str, float]:
    """Metrics of the newest update (host copies: call it once per logged row, not per update)."""
    norm = float(update.grad_norm)
    entries = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    undo_clip = max(1.0, norm / config.max_grad_norm)
    return {
        "advantage": float(update.loss.advantage),
        "values": float(update.values),
        "batch_rewards": float(update.returns),
        "loss_entropy": -config.entropy_coef * float(update.loss.entropy),
        "loss_policy": float(update.loss.policy),
        "loss_value": float(update.loss.value),
        "loss_total": float(update.loss.total),
        "entropy": float(update.loss.entropy),
        "ratio": float(update.loss.ratio),
        "grad_l2": norm,
        "grad_max": float(entries.abs().max()) * undo_clip,
        "grad_var": float(entries.var(unbiased=False)) * undo_clip**2,
    }


def _open_csv(path: Path, columns: tuple[str, ...], keep_until: int | None) -> Any:
    """Open a CSV file for appending, with its header; drop rows beyond `keep_until` env_steps."""
    rows: list[list[str]] = []
    if keep_until is not None and path.exists():
        with open(path, newline="", encoding="utf-8") as old:
            rows = [r for r in csv.reader(old) if len(r) == len(columns) and r[0].isdigit() and int(r[0]) <= keep_until]
    text = io.StringIO()
    csv.writer(text).writerows([columns, *rows])
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))
    return open(path, "a", newline="", encoding="utf-8")

"""What a run leaves behind: config.json, metrics.csv, episodes.csv, TensorBoard events.

`METRICS` is the list of everything that is logged, with its meaning and unit.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from a2c.config import Config
from a2c.files import CsvTable, exact, write_atomically
from a2c.games import Episode
from a2c.learner import Learner
from a2c.optimizer import learning_rate

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
    "lag": "policy lag: updates between acting and learning, mean over the newest rollout (count)",
    "grad_l2": "L2 norm of the gradient before the clip",
    "grad_max": "largest size of one gradient entry before the clip",
    "grad_var": "variance of the gradient's entries before the clip",
    "learning_rate": "step size of the optimiser now",
    "share_env": "share of wall time in which environments step (0 to 1)",
    "share_act": "share of wall time in which the policy acts (0 to 1)",
    "share_learn": "share of wall time in which batches are learned (0 to 1)",
}
SCORES = ("reward", "reward_100", "best_reward_100")  # written exactly, however large
EPISODE_COLUMNS = ("env_steps", "seconds", "score", "length")
WINDOW = 100  # games in the moving mean that people compare


class Scores:
    """Running account of finished games: how many, the last 100 scores, the best mean."""

    def __init__(self) -> None:
        self.games = 0
        self.last: deque[float] = deque(maxlen=WINDOW)
        self.best_mean = -math.inf  # highest mean over a full window
        self.reached = -math.inf  # highest mean that met a target

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

    def meets(self, target: float) -> bool:
        """True once the mean of 100 games was at `target` when asked; games that end later do not undo it."""
        if self.full and self.mean >= target:
            self.reached = max(self.reached, self.mean)
        return self.reached >= target

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "games": self.games,
            "last": list(self.last),
            "best_mean": self.best_mean,
            "reached": self.reached,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.games, self.best_mean = int(state["games"]), float(state["best_mean"])
        self.reached = float(state["reached"])
        self.last = deque(map(float, state["last"]), maxlen=WINDOW)


class RunLogger:
    """Writes the files of one run directory, row by row.

    OSError of a refusing disk comes through; rows of the CSV files wait for the next call then,
    TensorBoard misses points.
    """

    def __init__(self, run_dir: Path, config: Config, keep_until: int | None = None) -> None:
        """`keep_until`: on resume, drop rows after these env_steps, which will be replayed."""
        self.run_dir, self.config = run_dir, config
        write_atomically(run_dir / "config.json", config.to_json().encode())
        self._metrics = CsvTable(run_dir / "metrics.csv", tuple(METRICS), keep_until)
        self._episodes = CsvTable(run_dir / "episodes.csv", EPISODE_COLUMNS, keep_until)
        self._first_step = None if keep_until is None else keep_until + 1
        self._board: EventFile | None = None

    def episodes(self, env_steps: int, seconds: float, games: Sequence[Episode]) -> None:
        """One row of episodes.csv per finished game."""
        self._episodes.add([(env_steps, f"{seconds:.2f}", exact(game.score), game.length) for game in games])

    def metrics(self, row: dict[str, float]) -> None:
        """One row of metrics.csv and one point per TensorBoard tag; the keys are those of METRICS."""
        self._metrics.add([[_cell(name, row.get(name, "")) for name in METRICS]])
        points = {name: value for name, value in row.items() if name != "env_steps"}
        if self._board is None:
            self._board = EventFile(self.run_dir / "tensorboard", self._first_step)
        self._board.add(int(row["env_steps"]), time.time(), points)

    def rewind(self, env_steps: int) -> None:
        """Drop the rows after `env_steps`, which will be replayed."""
        self._metrics.rewind(env_steps)
        self._episodes.rewind(env_steps)
        self._close_board()
        self._first_step = env_steps + 1

    def keep_config(self) -> None:
        """Write config.json again where somebody has removed it."""
        path = self.run_dir / "config.json"
        if not path.exists():
            write_atomically(path, self.config.to_json().encode())

    def close(self) -> None:
        """Write what waits and close every file; OSError where the disk refuses."""
        with ExitStack() as closing:
            closing.callback(self._close_board)
            for table in (self._metrics, self._episodes):
                closing.callback(table.add, [])

    def _close_board(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            with suppress(OSError):  # TensorBoard may miss its last points
                board.close()


class EventFile:
    """Scalars for TensorBoard, written by the caller's thread, so that a full disk shows as OSError here.

    tensorboardX's SummaryWriter writes from a thread that such an error ends; its queue then fills
    up and blocks the run.
    """

    def __init__(self, directory: Path, first_step: int | None) -> None:
        """`first_step`: TensorBoard forgets points of earlier files from here on (a resumed run)."""
        directory.mkdir(parents=True, exist_ok=True)
        if directory.is_symlink():
            raise OSError(f"{directory} must not be a link")
        # A name that nobody can have put a link at.
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}.{secrets.token_hex(8)}")
        if first_step is not None:
            self._writer.write_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        self._writer.flush()

    def add(self, step: int, seconds: float, values: dict[str, float]) -> None:
        """One point per name, at wall time `seconds`; NaN and infinite values are left out."""
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.write_event(Event(step=step, wall_time=seconds, summary=scalar(name, value)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        with suppress(ValueError):  # closed already
            self._writer.close()


def _cell(name: str, value: float | str) -> float | str:
    if not isinstance(value, float):
        return value
    return exact(value) if name in SCORES else f"{value:.6g}"


class Meter:
    """Wall time: of the whole run, and of its stages since the newest row."""

    def __init__(self, seconds: float = 0.0, env_steps: int = 0) -> None:
        """`seconds` and `env_steps` of earlier sessions."""
        self._started = time.perf_counter() - seconds
        self.begin_row(env_steps)

    @property
    def seconds(self) -> float:
        """Wall time of training, earlier sessions included."""
        return time.perf_counter() - self._started

    @property
    def row_seconds(self) -> float:
        """Wall time since the newest row."""
        return time.perf_counter() - self._row_began

    def begin_row(self, env_steps: int) -> None:
        """A row has been written at `env_steps`."""
        self._row_began, self.row_steps = time.perf_counter(), env_steps
        self.spent = {"env": 0.0, "act": 0.0, "learn": 0.0}


def metrics_row(learner: Learner, scores: Scores, meter: Meter) -> dict[str, float]:
    """All of METRICS as they stand; those of the newest update are missing while there is none."""
    elapsed = meter.row_seconds
    return {
        "env_steps": learner.env_steps,
        "seconds": meter.seconds,
        "updates": learner.updates,
        "games": scores.games,
        "reward": scores.newest,
        "reward_100": scores.mean,
        "best_reward_100": scores.best_mean,
        "speed": (learner.env_steps - meter.row_steps) / elapsed,
        "learning_rate": learning_rate(learner.config, learner.env_steps),
        **{f"share_{stage}": seconds / elapsed for stage, seconds in meter.spent.items()},
        **learner.metrics(),
    }

"""The log files of a run: config.json, metrics.csv, episodes.csv, TensorBoard events; rows for Weights & Biases.

`METRICS` lists everything that is logged, with meaning and unit.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from a2c.config.config import Config
from a2c.envs.vector_env import Episode
from a2c.metrics.files import CsvTable, write_atomically
from a2c.metrics.meters import EPISODE_COLUMNS
from a2c.metrics.text import format_number
from a2c.metrics.wandb_run import WandbRun

METRICS = {
    "env_steps": "agent decisions summed over environments (count)",
    "seconds": "wall time of training, all sessions of the run together (s)",
    "updates": "optimiser steps (count)",
    "episodes": "finished episodes (count)",
    "reward": "score of the last episode (points of the game)",
    "reward_100": "mean score of the last 100 episodes (points of the game)",
    "best_reward_100": "highest reward_100 so far, once 100 episodes are finished (points of the game)",
    "eval_score": "mean score of the last policy that was evaluated during the run, with --eval-every (points)",
    "length_100": "mean length of the last 100 episodes (agent decisions)",
    "speed": "agent decisions per second since the last row (1/s)",
    "advantage": "mean of return - value over the last minibatch (return)",
    "values": "mean of the value head over the last minibatch (return)",
    "batch_rewards": "mean bootstrapped return of the last minibatch (return)",
    "loss_entropy": "-entropy_coef * entropy of the last minibatch",
    "loss_policy": "policy gradient term of the last minibatch",
    "loss_value": "mean squared error of the value head over the last minibatch (squared return)",
    "loss_total": "loss_policy + value_coef * loss_value + loss_entropy",
    "entropy": "mean entropy of the policy (nats; log A is a uniform policy)",
    "ratio": "mean importance ratio of the last minibatch, clipped at 1",
    "approx_kl": "estimate of KL(policy that acted, policy now) on the last minibatch (nats)",
    "clip_fraction": "share of the last minibatch's samples whose importance ratio was clipped at 1 (0 to 1)",
    "explained_variance": "share of the last minibatch's variance of returns that the value head explains (up to 1)",
    "policy_lag": "updates between acting and learning, mean over the last rollout (count)",
    "grad_l2": "L2 norm of the gradient before clipping",
    "grad_max": "largest absolute entry of the gradient before clipping",
    "grad_var": "variance of the gradient's entries before clipping",
    "learning_rate": "step size of the optimiser now",
    "exploration_noise": "standard deviation of the noise on the logits now (nats)",
    "share_env": "share of wall time in which environments step",
    "share_act": "share of wall time in which the policy acts",
    "share_learn": "share of wall time in which the network learns",
}
GROUPS = {  # of the tags of TensorBoard and wandb, such as loss/loss_value
    "score": ("reward", "reward_100", "best_reward_100", "eval_score", "length_100", "episodes"),
    "loss": ("loss_policy", "loss_value", "loss_entropy", "loss_total"),
    "value": ("values", "batch_rewards", "advantage", "explained_variance"),
    "policy": ("entropy", "ratio", "approx_kl", "clip_fraction", "policy_lag", "exploration_noise"),
    "update": ("updates", "learning_rate", "grad_l2", "grad_max", "grad_var"),
    "time": ("seconds", "speed", "share_env", "share_act", "share_learn"),
}
TAGS = {name: f"{group}/{name}" for group, names in GROUPS.items() for name in names}
SCORES = ("reward", "reward_100", "best_reward_100", "eval_score")  # written exactly, however large


class RunLogger:
    """Writes the log files of one run directory, row by row.

    `add_episodes` and `add_metrics` keep rows for `write`. Where the disk refuses, `write` and the constructor raise
    OSError; the rows of the CSV files are kept for the next call then, TensorBoard may miss points.
    """

    def __init__(self, run_dir: Path, config: Config, keep_until: int | None = None) -> None:
        """`keep_until`: on resume, drop rows after these env_steps, which will be replayed."""
        self.run_dir, self.config = run_dir, config
        write_atomically(run_dir / "config.json", config.to_json().encode())
        self._metrics = CsvTable(run_dir / "metrics.csv", tuple(METRICS), keep_until)
        self._episodes = CsvTable(run_dir / "episodes.csv", EPISODE_COLUMNS, keep_until)
        self._points: list[tuple[int, float, dict[str, float]]] = []  # env_steps, wall time and values by tag
        self._first_step = None if keep_until is None else keep_until + 1
        self._board: EventFile | None = None
        self._wandb: WandbRun | None = None

    def add_episodes(self, env_steps: int, seconds: float, episodes: Sequence[Episode]) -> None:
        """Keep one row of episodes.csv per finished episode for `write`."""
        rows = [(env_steps, f"{seconds:.2f}", format_number(one.score), one.length) for one in episodes]
        self._episodes.add(rows)

    def add_metrics(self, row: dict[str, float]) -> None:
        """Keep one row of metrics.csv and one point per TensorBoard tag for `write`; the keys are those of METRICS."""
        self._metrics.add([[_cell(name, row.get(name, "")) for name in METRICS]])
        points = {TAGS[name]: value for name, value in row.items() if name != "env_steps"}
        self._points.append((int(row["env_steps"]), time.time(), points))

    def write(self, sync: bool = False) -> None:
        """Write what has been kept, and config.json where it has been removed; OSError if the disk refuses.

        `sync`: the rows of the CSV files survive a power failure after that.
        """
        if not (self.run_dir / "config.json").exists():
            write_atomically(self.run_dir / "config.json", self.config.to_json().encode())
        with ExitStack() as writing:  # each table, whatever happens to the other
            for table in (self._metrics, self._episodes):
                if sync:
                    writing.callback(table.sync)  # the last callback is called first
                writing.callback(table.write)
        while self._points:
            env_steps, seconds, points = self._points.pop(0)
            self._show(env_steps, seconds, points)

    def _show(self, env_steps: int, seconds: float, points: dict[str, float]) -> None:
        """Write points for Weights & Biases and TensorBoard, each whatever happens to the other."""
        with ExitStack() as showing:
            showing.callback(self._show_on_board, env_steps, seconds, points)
            if self.config.wandb:
                self._wandb = self._wandb or WandbRun(self.run_dir, self.config)
                self._wandb.add(env_steps, points)

    def _show_on_board(self, env_steps: int, seconds: float, points: dict[str, float]) -> None:
        try:
            if self._board is None:
                self._board = EventFile(self.run_dir / "tensorboard", self._first_step)
                self._first_step = None  # a file after this one drops nothing
                self._board.text("config", settings_table(self.config), env_steps)
            self._board.add(env_steps, seconds, points)
        except OSError:  # the file may end in half a record, after which nothing is read: the next one begins another
            self._close_board()
            raise

    def rewind(self, env_steps: int) -> None:
        """Drop the rows after `env_steps`, which will be replayed."""
        self._metrics.rewind(env_steps)
        self._episodes.rewind(env_steps)
        self._points = [point for point in self._points if point[0] <= env_steps]
        self._close_board()
        self._first_step = env_steps + 1

    def messages(self) -> list[str]:
        """What wandb has to tell since the last call."""
        return self._wandb.messages() if self._wandb else []

    def close(self) -> None:
        """Close every file, without what `write` has not written; may be called twice."""
        self._close_board()
        if self._wandb:
            self._wandb.close()

    def _close_board(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            with suppress(OSError):  # TensorBoard may miss its last points
                board.close()


class EventFile:
    """Scalars for TensorBoard, written in the caller's thread, so that a full disk raises OSError here.

    tensorboardX's SummaryWriter writes in a thread of its own, which such an error ends; its queue then
    fills up and blocks the run.
    """

    def __init__(self, directory: Path, first_step: int | None) -> None:
        """`first_step`: TensorBoard drops the points of earlier files from this step on (a resumed run)."""
        directory.mkdir(parents=True, exist_ok=True)
        if directory.is_symlink():
            raise OSError(f"{directory} must not be a link")
        from tensorboardX.event_file_writer import EventsWriter  # which imports torch
        from tensorboardX.proto import event_pb2, summary_pb2

        self._events, self._summaries = event_pb2, summary_pb2
        # An unpredictable name, at which nobody can have put a link.
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}.{secrets.token_hex(8)}")
        if first_step is not None:
            log = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.write_event(self._events.Event(step=first_step, session_log=log))
        self._writer.flush()

    def add(self, step: int, seconds: float, values: dict[str, float]) -> None:
        """Write one point per name, at wall time `seconds`; NaN and infinite values are left out."""
        for name, value in values.items():
            if math.isfinite(value):
                point = self._summaries.Summary.Value(tag=name, simple_value=value)
                summary = self._summaries.Summary(value=[point])
                self._writer.write_event(self._events.Event(step=step, wall_time=seconds, summary=summary))
        self._writer.flush()

    def text(self, tag: str, text: str, step: int = 0) -> None:
        """Write a text, which TensorBoard shows as Markdown."""
        from tensorboardX.summary import text as text_summary

        self._write(text_summary(tag, text), step)

    def image(self, tag: str, content: bytes, size: tuple[int, int], step: int = 0) -> None:
        """Write an image file, such as a GIF, which moves in TensorBoard; `size` is its height and width (pixels)."""
        picture = self._summaries.Summary.Image(
            height=size[0], width=size[1], colorspace=3, encoded_image_string=content
        )
        value = self._summaries.Summary.Value(tag=tag, image=picture)
        self._write(self._summaries.Summary(value=[value]), step)

    def _write(self, summary: Any, step: int) -> None:
        self._writer.write_event(self._events.Event(step=step, wall_time=time.time(), summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        with suppress(ValueError):  # it is closed
            self._writer.close()


def settings_table(config: Config) -> str:
    """The settings of a run as a Markdown table, first those that differ from the defaults of `Config`."""
    rows = [(name, value, getattr(Config, name)) for name, value in vars(config).items()]
    rows.sort(key=lambda row: row[1] == row[2])  # stable: otherwise in the order of the fields
    lines = [f"| {name} | {_markdown(value)} | {_markdown(default)} |" for name, value, default in rows]
    return "\n".join(["| setting | value | default |", "| --- | --- | --- |", *lines])


def _markdown(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _cell(name: str, value: float | str) -> float | str:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return ""
    return format_number(value) if name in SCORES else f"{value:.6g}"

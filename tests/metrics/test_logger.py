"""What a run leaves behind and shows: scores, CSV files, TensorBoard tags, the curve, the progress line."""

import csv
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event
from toys import ConstantEnv, learn, vector

from a2c.batch import Experience, Transitions
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.envs.vector_env import Episode
from a2c.learner import describe_update
from a2c.metrics.console import Display, clock, score
from a2c.metrics.files import exact
from a2c.metrics.logger import SCORES, RunLogger
from a2c.metrics.meters import EPISODE_COLUMNS, METRICS, WINDOW, ScoreWindow
from a2c.metrics.plots import draw_curve
from a2c.metrics.results import moving_mean, read_episodes
from a2c.networks import MlpA2C
from a2c.update import make_optimizer

CLASSIC_TAGS = (
    *("advantage", "values", "batch_rewards", "loss_entropy", "loss_policy", "loss_value", "loss_total"),
    *("grad_l2", "grad_max", "grad_var", "reward", "reward_100", "speed"),
)


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def events(run_dir):
    """TensorBoard's records: 8 bytes of length, 4 of checksum, the event, 4 of checksum."""
    (path,) = (run_dir / "tensorboard").glob("events.*")
    content, at, found = path.read_bytes(), 0, {}
    while at < len(content):
        length = int.from_bytes(content[at : at + 8], "little")
        event = Event.FromString(content[at + 12 : at + 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        at += 16 + length
    return found


def row_of(env_steps, **changes):
    return {name: float(i) for i, name in enumerate(METRICS)} | {"env_steps": env_steps, "episodes": 3, **changes}


def test_scores_keep_a_window_and_the_best_mean_of_a_full_one():
    scores = ScoreWindow()
    assert math.isnan(scores.mean) and math.isnan(scores.last_update) and scores.best_mean == -math.inf
    scores.add([50.0] * (WINDOW - 1))
    assert scores.mean == 50.0 and not scores.full and scores.best_mean == -math.inf  # 99 lucky games prove nothing
    scores.add([50.0, -50.0])
    assert (scores.games, scores.last_update, scores.mean, scores.best_mean) == (WINDOW + 1, -50.0, 49.0, 50.0)
    scores.add([0.0] * WINDOW)
    assert (scores.mean, scores.best_mean) == (0.0, 50.0)


def test_scores_survive_a_checkpoint():
    scores, again = ScoreWindow(), ScoreWindow()
    scores.add(float(i) for i in range(WINDOW + 20))
    again.load_state_dict(scores.state_dict())
    for both in (scores, again):
        both.add([1000.0])
    assert again.state_dict() == scores.state_dict() and again.mean == scores.mean


def test_classic_tags_exist_and_every_metric_says_what_it_is():
    assert set(CLASSIC_TAGS) <= set(METRICS)
    assert all(len(text) > 15 for text in METRICS.values())


def test_a_row_goes_to_the_csv_file_and_to_tensorboard(tmp_path):
    logger = RunLogger(tmp_path, Config())
    logger.metrics(row_of(64, reward_100=math.nan, speed=123456.789))
    (row,) = rows(tmp_path / "metrics.csv")  # flushed before it is closed
    logger.close()
    assert tuple(row) == tuple(METRICS)
    assert row["env_steps"] == "64" and float(row["speed"]) == pytest.approx(123456.789, rel=1e-5)
    assert row["reward_100"] == "nan"
    logged = events(tmp_path)
    assert logged["speed", 64] == pytest.approx(123456.789)
    assert {tag for tag, _ in logged} == set(METRICS) - {"env_steps", "reward_100"}  # a nan draws no point


def test_one_row_per_finished_game(tmp_path):
    logger = RunLogger(tmp_path, Config())
    logger.episodes(40, 1.5, [Episode(0, -21.0, 900), Episode(3, 2.5, 800)])
    logger.episodes(80, 2.0, [])
    assert [tuple(row.values()) for row in rows(tmp_path / "episodes.csv")] == [
        ("40", "1.50", "-21", "900"),
        ("40", "1.50", "2.5", "800"),
    ]
    assert tuple(rows(tmp_path / "episodes.csv")[0]) == EPISODE_COLUMNS
    assert read_episodes(tmp_path)["score"].tolist() == [-21.0, 2.5]
    logger.close()


@pytest.mark.parametrize("points", [21.0, -21.0, 1234567.0, 98765432.25, 0.1 + 0.2, 1e22, -0.0, math.inf])
def test_scores_read_back_exactly(points, tmp_path):
    assert float(exact(points)) == points
    logger = RunLogger(tmp_path, Config())
    logger.episodes(40, 1.5, [Episode(0, points, 900)])
    logger.metrics(row_of(40, reward=points, reward_100=points, best_reward_100=points))
    logger.close()
    assert read_episodes(tmp_path)["score"].tolist() == [points]
    (row,) = rows(tmp_path / "metrics.csv")
    assert all(float(row[name]) == points for name in SCORES)
    assert exact(21.0) == "21" and exact(-1234567.0) == "-1234567"


class Tenths(ConstantEnv):
    """Pays 0.7 for each of ten decisions."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, 0.7, *rest


def test_fractions_of_points_are_summed_exactly():
    envs, scores = vector(Tenths(), Tenths()), []
    envs.reset()
    for _ in range(10):
        *_, info = envs.step(np.zeros(2, np.int64))
        scores += [game.score for game in info["episodes"]]
    assert scores == [sum([0.7] * 10)] * 2 and scores[0] == pytest.approx(7.0, abs=1e-12)


def test_resuming_drops_rows_that_will_be_lived_again(tmp_path):
    for keep_until in (None, 20):
        logger = RunLogger(tmp_path, Config(), keep_until)
        for env_steps in (10, 20, 30) if keep_until is None else (40,):
            logger.metrics(row_of(env_steps))
            logger.episodes(env_steps, 1.0, [Episode(0, 1.0, 5)])
        logger.close()
    for name in ("metrics.csv", "episodes.csv"):
        assert [row["env_steps"] for row in rows(tmp_path / name)] == ["10", "20", "40"]


def test_a_half_written_last_line_is_dropped_on_resume(tmp_path):
    RunLogger(tmp_path, Config()).close()
    with open(tmp_path / "episodes.csv", "a", encoding="utf-8") as file:
        file.write("10,1.00,5,6\n12,1.")
    RunLogger(tmp_path, Config(), keep_until=20).close()
    assert [row["env_steps"] for row in rows(tmp_path / "episodes.csv")] == ["10"]


def test_learning_metrics_describe_the_gradient_before_the_clip():
    config = Config(threads=1, precision="float32", sliding_batch=4, gae_lambda=1.0, num_minibatches=1)
    batch = Transitions([Experience(np.ones(3, np.float32) * i, i % 2, 5.0, None) for i in range(4)])
    found = []
    for max_grad_norm in (1e6, 1e-3):  # a clip that does nothing, one that does
        compute = Compute(config)
        torch.manual_seed(0)
        net = MlpA2C((3,), 2)
        changed = Config(**vars(config) | {"max_grad_norm": max_grad_norm})
        result, norm = learn(net, net, make_optimizer(net, changed), batch, changed, compute)
        found.append(describe_update(result, norm, net, changed))
        compute.close()
    free, clipped = found
    assert free["grad_l2"] > 0.1
    for name in free:
        assert clipped[name] == pytest.approx(free[name], rel=1e-3), name
    total = free["loss_policy"] + config.value_coef * free["loss_value"] + free["loss_entropy"]
    assert free["loss_total"] == pytest.approx(total, rel=1e-5)
    assert free["advantage"] == pytest.approx(free["batch_rewards"] - free["values"], rel=1e-5)
    assert free["loss_entropy"] == pytest.approx(-config.entropy_coef * free["entropy"]) and free["entropy"] > 0.6


def test_moving_mean_by_hand():
    assert moving_mean(np.array([3.0, 5.0, 1.0, 7.0]), window=3).tolist() == pytest.approx([3.0, 4.0, 3.0, 13 / 3])
    assert moving_mean(np.array([])).tolist() == []


def test_the_curve_is_a_picture_once_a_game_is_finished(tmp_path):
    logger = RunLogger(tmp_path, Config())
    assert draw_curve(tmp_path, "no game") is None
    logger.episodes(100, 1.0, [Episode(0, -21.0, 50)])
    logger.episodes(200, 2.0, [Episode(0, -20.0, 50)])
    logger.close()
    path = draw_curve(tmp_path, "two games", target=18.0)
    assert path == tmp_path / "curve.png" and path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_the_progress_line_says_it_all():
    row = row_of(1500, games=7, reward_100=-20.25, best_reward_100=-math.inf, speed=500.0)
    row |= {"share_env": 0.5, "share_act": 0.2, "share_learn": 0.3}
    line = Display(Config(total_env_steps=10_000, progress=False)).line(row)
    for part in (
        "1,500/10,000 steps",
        "7 games",
        "mean -20.2",
        "best -",
        "500 steps/s",
        "2,000 frames/s",
        "left 0:00:17",
    ):
        assert part in line
    assert "env 50% act 20% learn 30%" in line and "\n" not in line
    cartpole = Display(Config(env="CartPole-v1", progress=False)).line(row)
    assert "500 frames/s" in cartpole  # nothing is skipped there


def test_times_and_scores_are_readable():
    assert [clock(s) for s in (0, 59.9, 3661, math.nan, math.inf)] == ["0:00:00", "0:00:59", "1:01:01", "-", "-"]
    assert [score(s) for s in (18.04, math.nan, -math.inf)] == ["18.0", "-", "-"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_row_before_the_first_update_can_be_shown(terminal, capsys):
    # With sliding windows the first rows have no loss yet.
    display = Display(Config(progress=True))
    display.console = Console(force_terminal=terminal, width=200)
    row = {name: value for name, value in row_of(5).items() if name not in learning_names()}
    if terminal:
        display.console.print(display._panel(row))
    else:
        display.show(row)
    display.close()
    assert "episodes" in capsys.readouterr().out


def shown_on_a_terminal(monkeypatch, kind, act):
    """What `act(display)` writes to a terminal of 80 columns, and whether the display was a live one."""
    screen, end = os.openpty()
    with os.fdopen(end, "w") as stdout, monkeypatch.context() as patch:
        patch.setenv("TERM", kind)
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "stdout", stdout)
        display = Display(Config(progress=True))
        act(display)
        stdout.write("\nend\n")
        stdout.flush()
        written = b""
        while b"\r\nend\r\n" not in written:
            written += os.read(screen, 65536)
        shown = written.decode().replace("\r\n", "\n")
        display.close()
    os.close(screen)
    return shown, display.live is not None


@pytest.mark.parametrize(("kind", "live"), [("dumb", False), ("unknown", False), ("xterm", True)])
def test_a_dumb_terminal_gets_a_line_per_row(kind, live, monkeypatch):
    shown, is_live = shown_on_a_terminal(monkeypatch, kind, lambda display: display.show(row_of(1500)))
    assert is_live == live
    assert ("1,500/1,500,000 steps | 3 games" in shown) != live and ("\x1b[" in shown) == live


def test_the_run_directory_can_be_copied_from_a_narrow_terminal(monkeypatch):
    run_dir = Path("/a/rather/long/path/with [brackets] and :smile: and so on" + "/and/on" * 12)
    shown, _ = shown_on_a_terminal(
        monkeypatch, "dumb", lambda display: display.summary(row_of(1500), "stopped by SIGINT", run_dir)
    )
    assert f"\nrun directory {run_dir}\n" in shown


def learning_names():
    return set(METRICS) & {*CLASSIC_TAGS, "entropy", "ratio"} - {"reward", "reward_100", "speed"}

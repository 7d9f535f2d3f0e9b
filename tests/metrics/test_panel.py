"""The live panel: what it shows before and after 100 episodes, its sparkline, the time to the target."""

import io
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from runs import row_of

from a2c.config.config import Config
from a2c.metrics.panel import BLOCKS, WIDTH, Panel, sparkline


def text_of(panel, env_steps=5000, seconds=60.0, note=""):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel.render(env_steps, seconds, note))
    return console.export_text()


def panel_of(*rows, run_dir="runs/x", **changes):
    panel = Panel(Config(**{"target_score": 18.0, **changes}), 4, Path(run_dir))
    for row in rows:
        panel.add(row)
    return panel


def test_panel_before_the_first_row_shows_steps_time_and_directory():
    text = text_of(panel_of(), 1234, 75.0)
    for part in ("PongNoFrameskip-v4", "1,234 of 1,000,000", "0:01:15   left -", "runs/x"):
        assert part in text
    assert "score" not in text


def test_panel_says_why_there_is_no_best_mean_before_100_episodes():
    row = row_of(1500, episodes=99, reward_100=-20.25, best_reward_100=-math.inf, speed=500.0)
    assert "mean -20.2   best: after 100 episodes   stops at 18" in text_of(panel_of(row))
    row = row_of(1500, episodes=100, reward_100=-20.25, best_reward_100=-19.0, speed=500.0)
    assert "mean -20.2   best -19.0   stops at 18" in text_of(panel_of(row))


def test_panel_shows_loss_entropy_speed_shares_and_a_note():
    row = row_of(1500, loss_total=0.12345, entropy=1.5, speed=500.0, share_env=0.5, share_act=0.2, share_learn=0.3)
    text = text_of(panel_of(row), note="stopping")
    for part in (
        "0.1235   entropy 1.50 nats",
        "500 steps/s   2,000 frames/s",
        "acting 20%",
        "\nstopping",
        "left 0:33:10",
    ):
        assert part in text


def test_the_time_left_ends_where_the_session_ends():
    panel = panel_of(stop_after=4000)
    assert panel.seconds_left(1500, {"speed": 500.0}) == 5.0 and "1,500 of 4,000" in text_of(panel, 1500)


def test_panel_shows_the_last_evaluation_where_there_is_one():
    row = row_of(1500, speed=500.0, eval_score=15.25)
    assert "evaluation  mean 15.2" in text_of(panel_of(row))
    del row["eval_score"]
    assert "evaluation" not in text_of(panel_of(row))


def test_panel_estimates_the_time_to_the_target_from_the_slope_of_the_mean():
    def rows(slope):
        made = (
            row_of(1000 * i, seconds=10.0 * i, episodes=100, reward_100=slope * i, speed=100.0) for i in range(1, 6)
        )
        return [*made]

    assert "target in 0:02:10" in text_of(panel_of(*rows(1.0)))  # 13 points at a point per 10 seconds
    assert "target in" not in text_of(panel_of(*rows(-1.0)))
    assert "target in" not in text_of(panel_of(*rows(1.0)[:2]))
    assert "target in" not in text_of(panel_of(*rows(1.0), target_score=None))
    assert "target in" not in text_of(panel_of(*(row | {"reward_100": math.nan} for row in rows(1.0))))


@pytest.mark.parametrize("mean", [9.4, -20.9, -500.0])
def test_panel_estimates_no_time_to_the_target_for_a_mean_that_stands_still(mean):
    seconds = np.cumsum(np.random.default_rng(0).uniform(4.9, 5.1, 20))
    rows = [row_of(1000, seconds=at, episodes=100, reward_100=mean, speed=100.0) for at in seconds]
    assert "target in" not in text_of(panel_of(*rows))
    assert "target in" not in text_of(
        panel_of(*(row | {"seconds": 5.0, "reward_100": i} for i, row in enumerate(rows)))
    )


def test_panel_takes_a_directory_for_what_it_is():
    assert "runs/x[/y] :smile: [red]" in text_of(panel_of(run_dir="runs/x[/y] :smile: [red]"))


def test_panel_forgets_what_will_be_replayed():
    panel = panel_of(*(row_of(steps, reward_100=float(steps)) for steps in (100, 200, 300)))
    panel.rewind(200)
    assert [row["env_steps"] for row in panel.rows] == [100, 200] and panel.means == [(100, 100.0), (200, 200.0)]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([math.nan, -math.inf], ""),
        ([3.0], BLOCKS[0]),
        ([0.0, 7.0, 3.0, math.nan], BLOCKS[0] + BLOCKS[7] + BLOCKS[3]),
    ],
)
def test_sparkline_by_hand(values, line):
    assert sparkline(values) == line


def test_sparkline_of_many_values_spans_all_of_them():
    line = sparkline([float(i) for i in range(1000)])
    assert len(line) == WIDTH and line[0] == BLOCKS[0] and line[-1] == BLOCKS[-1] and [*line] == sorted(line)

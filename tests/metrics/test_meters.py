"""The score window, the timer, the list of metrics."""

import math

import numpy as np
import pytest

from a2c.metrics.logger import METRICS, TAGS
from a2c.metrics.meters import WINDOW, ScoreWindow, StageTimer
from a2c.metrics.results import moving_mean

CLASSIC_TAGS = (
    *("advantage", "values", "batch_rewards", "loss_entropy", "loss_policy", "loss_value", "loss_total"),
    *("grad_l2", "grad_max", "grad_var", "reward", "reward_100", "speed"),
)


def test_score_window_keeps_the_best_mean_of_a_full_window():
    scores = ScoreWindow()
    assert math.isnan(scores.mean) and math.isnan(scores.last_score) and scores.best_mean == -math.inf
    assert math.isnan(scores.metrics()["length_100"])
    scores.add([50.0] * (WINDOW - 1), [7] * (WINDOW - 1))
    assert scores.mean == 50.0 and not scores.full and scores.best_mean == -math.inf  # 99 lucky episodes prove nothing
    scores.add([50.0, -50.0], [7, 207])
    assert scores.metrics() == {
        "episodes": WINDOW + 1,
        "reward": -50.0,
        "reward_100": 49.0,
        "best_reward_100": 50.0,
        "length_100": 9.0,
    }
    scores.add([0.0] * WINDOW)
    assert (scores.mean, scores.best_mean) == (0.0, 50.0)


def test_score_window_continues_after_a_checkpoint():
    scores, again = ScoreWindow(), ScoreWindow()
    scores.add((float(i) for i in range(WINDOW + 20)), range(WINDOW + 20))
    again.load_state_dict(scores.state_dict())
    for both in (scores, again):
        both.add([1000.0])
    assert again.state_dict() == scores.state_dict() and again.mean == scores.mean
    again.load_state_dict({name: value for name, value in scores.state_dict().items() if name != "lengths"})
    assert again.mean == scores.mean and math.isnan(again.metrics()["length_100"])


@pytest.mark.parametrize("scores", [[0.1] * 3 + [0.9] * 130, [0.1] * 250, [1e17, *[1.0] * 120], [1.0, 2.0] * 80])
def test_a_run_and_its_table_have_the_same_mean_to_the_last_bit(scores):
    window, means = ScoreWindow(), []
    for score in scores:
        window.add([score])
        means.append(window.mean)
    assert moving_mean(np.array(scores)).tolist() == means and means[-1] == pytest.approx(np.mean(scores[-WINDOW:]))


def test_scores_whose_sum_is_not_finite_have_no_mean():
    scores = ScoreWindow()
    scores.add([math.inf, -math.inf])
    assert math.isnan(scores.mean)
    assert math.isnan(moving_mean(np.array([1e308] * 3))[-1])


def test_metrics_hold_the_classic_tags_and_describe_each():
    assert set(CLASSIC_TAGS) <= set(METRICS)
    assert all(len(text) > 15 for text in METRICS.values())
    assert set(TAGS) == set(METRICS) - {"env_steps"} and TAGS["loss_value"] == "loss/loss_value"


def test_stage_timer_reports_speed_and_shares_since_the_last_row(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("a2c.metrics.meters.time.perf_counter", lambda: now[0])
    timer = StageTimer()
    timer.start(seconds=50.0, env_steps=1000)
    timer.add({"env": 1.0, "act": 0.5, "learn": 0.5})
    timer.add({"env": 1.0}, env_steps=400)
    now[0] += 4.0
    shares = {"share_env": 0.5, "share_act": 0.125, "share_learn": 0.125}
    assert timer.metrics() == {"seconds": 54.0, "speed": 100.0, **shares}
    timer.begin_row(1400)
    now[0] += 1.0
    timer.add({}, env_steps=50)
    assert timer.env_steps == 1450 and timer.metrics() == {"seconds": 55.0, "speed": 50.0, **dict.fromkeys(shares, 0.0)}


def test_a_mean_equal_to_the_target_meets_it():
    scores = ScoreWindow()
    scores.add([21.0] * WINDOW)
    assert scores.meets(21.0) and not scores.meets(21.5)


def test_a_target_that_only_the_mean_between_two_episodes_of_one_step_reaches_is_met():
    scores = ScoreWindow()
    scores.add([20.0] * WINDOW + [10.0])
    assert scores.mean < 20.0 and scores.meets(20.0) and not scores.meets(20.1)


def test_a_target_set_by_a_resumed_run_is_not_met_by_a_mean_from_before():
    scores, resumed = ScoreWindow(), ScoreWindow()
    scores.add([20.0] * WINDOW + [5.0])
    resumed.load_state_dict(scores.state_dict())
    assert scores.meets(20.0) and not resumed.meets(20.0) and resumed.meets(19.8)

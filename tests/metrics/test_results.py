"""Moving means, medians with their intervals, and the learning curve."""

import numpy as np
import pytest

from a2c.config.config import Config
from a2c.envs.vector_env import Episode
from a2c.metrics.logger import RunLogger
from a2c.metrics.plots import draw_curve, picture
from a2c.metrics.results import (
    interquartile_mean,
    interval_of_curves,
    interval_of_mean,
    interval_of_median,
    median,
    moving_mean,
)


def test_moving_mean_by_hand():
    assert moving_mean(np.array([3.0, 5.0, 1.0, 7.0]), window=3).tolist() == pytest.approx([3.0, 4.0, 3.0, 13 / 3])
    assert moving_mean(np.array([])).tolist() == []


def test_interval_of_a_median_holds_it_and_is_no_wider_than_the_values():
    values = np.arange(101.0)
    low, high = interval_of_median(values)
    assert 0.0 < low < 50.0 < high < 100.0
    assert interval_of_median(np.array([7.0])) == (7.0, 7.0)
    assert interval_of_median(np.array([np.inf, np.inf])) == (np.inf, np.inf)


def test_median_of_an_even_number_lies_between_the_two_in_the_middle_and_a_missed_one_makes_it_infinite():
    assert median(np.array([4.0, 1.0, 9.0])) == 4.0 and median(np.array([4.0, 1.0, 9.0, np.inf])) == 6.5
    assert median(np.array([1.0, 2.0, np.inf, np.inf])) == median(np.array([np.inf])) == np.inf


def test_interval_of_a_median_reaches_infinity_where_half_of_the_runs_may_have_missed():
    low, high = interval_of_median(np.array([1.0, 2.0, 3.0, np.inf, np.inf]))
    assert low < 3.0 and high == np.inf
    assert interval_of_median(np.array([*range(1, 20), np.inf]))[1] < 20.0


def test_the_interval_of_curves_is_that_of_the_statistic_at_each_point():
    values = np.random.default_rng(1).normal(0.0, 1.0, (40, 3)) * [1.0, 10.0, 0.0] + [0.0, 0.0, 7.0]
    low, high = interval_of_curves(values, lambda drawn: np.median(drawn, axis=0))
    for point in range(2):
        assert (low[point], high[point]) == pytest.approx(interval_of_median(values[:, point]), rel=0.2)
    assert (low[2], high[2]) == (7.0, 7.0)
    low, high = interval_of_curves(values, lambda drawn: drawn.mean(axis=0))
    assert (low[0], high[0]) == pytest.approx(interval_of_mean(values[:, 0]), rel=0.2)


def test_interquartile_mean_leaves_out_the_lowest_and_the_highest_quarter():
    assert interquartile_mean(np.array([9.0, 1.0, 2.0, 100.0])) == 5.5
    assert interquartile_mean(np.array([[1.0, 4.0], [3.0, 0.0], [8.0, 2.0]])).tolist() == [4.0, 2.0]


def test_draw_curve_writes_a_picture_once_an_episode_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr("a2c.metrics.plots.picture", picture)  # as it was before tests/conftest.py replaced it
    logger = RunLogger(tmp_path, Config())
    assert draw_curve(tmp_path, "no episode") is None
    logger.add_episodes(100, 1.0, [Episode(0, -21.0, 50)])
    logger.add_episodes(200, 2.0, [Episode(0, -20.0, 50)])
    logger.write()
    logger.close()
    path = draw_curve(tmp_path, "two episodes", target=18.0)
    assert path == tmp_path / "curve.png" and path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_interval_of_the_mean_is_that_of_the_normal_approximation():
    values = np.random.default_rng(3).normal(5.0, 2.0, 400)
    low, high = interval_of_mean(values)
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.03)
    assert np.isnan(interval_of_mean(values[:4])).all()
    for count, quantile_of_t in ((5, 2.776), (10, 2.262), (30, 2.045)):
        low, high = interval_of_mean(values[:count])
        assert (high - low) / 2 / (values[:count].std(ddof=1) / count**0.5) == pytest.approx(quantile_of_t, abs=0.01)

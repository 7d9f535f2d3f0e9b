"""Moving means and the learning curve."""

import numpy as np
import pytest

from a2c.config.config import Config
from a2c.envs.vector_env import Episode
from a2c.metrics.logger import RunLogger
from a2c.metrics.plots import draw_curve
from a2c.metrics.results import moving_mean


def test_moving_mean_by_hand():
    assert moving_mean(np.array([3.0, 5.0, 1.0, 7.0]), window=3).tolist() == pytest.approx([3.0, 4.0, 3.0, 13 / 3])
    assert moving_mean(np.array([])).tolist() == []


def test_draw_curve_writes_a_picture_once_an_episode_is_finished(tmp_path):
    logger = RunLogger(tmp_path, Config())
    assert draw_curve(tmp_path, "no episode") is None
    logger.episodes(100, 1.0, [Episode(0, -21.0, 50)])
    logger.episodes(200, 2.0, [Episode(0, -20.0, 50)])
    logger.close()
    path = draw_curve(tmp_path, "two episodes", target=18.0)
    assert path == tmp_path / "curve.png" and path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000

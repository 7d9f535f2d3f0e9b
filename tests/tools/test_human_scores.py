"""Human-normalised scores: the scale, and a table whose games the emulator has."""

import gymnasium as gym
import pytest

from a2c.envs.single import is_atari
from a2c.tools.human_scores import SCORES, human_normalized


def test_a_random_player_has_0_and_a_human_1():
    assert human_normalized("breakout", 1.7) == 0.0 and human_normalized("breakout", 30.5) == 1.0
    assert human_normalized("pong", 21.0) == pytest.approx(41.7 / 35.3)
    assert human_normalized("othello", 3.0) is None


def test_the_table_has_the_57_games_and_the_human_is_better_in_each():
    known = {spec.kwargs["game"] for spec in gym.registry.values() if is_atari(spec)}
    assert len(SCORES) == 57 and set(SCORES) <= known
    assert all(random < human for random, human in SCORES.values())

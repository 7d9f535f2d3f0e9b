"""Snapshots of environments that are not Atari games: restored exactly, or known not to be."""

import random

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation

from a2c.envs.layers import restore_layers, save_layers
from a2c.run.values import to_arrays, to_tensors


class Walk(gym.Env):
    """A walk on a line of cells, drawn into a grid."""

    observation_space, action_space = gym.spaces.Box(0, 9, (2, 4), np.int64), gym.spaces.Discrete(2)

    def __init__(self):
        self.grid = np.zeros((2, 4), np.int64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.grid.copy(), {}

    def step(self, action):
        self.grid[action, self.np_random.integers(4)] += 1
        return self.grid.copy(), 0.0, False, False, {}


class Twice(Walk):
    """One array under two names, the second of which it sees."""

    def __init__(self):
        super().__init__()
        self.seen = self.grid

    def step(self, action):
        super().step(action)
        return self.seen.copy(), 0.0, False, False, {}


class View(Walk):
    def __init__(self):
        super().__init__()
        self.row = self.grid[1:]


class Parts(Walk):
    def __init__(self):
        super().__init__()
        self.body = [[1, 2], [3, 4]]
        self.head = self.body[0]


class OtherDraws(Walk):
    def __init__(self):
        super().__init__()
        self.draw = random.Random(3).random


class Samples(Walk):
    """Draws from a space in a space."""

    def __init__(self):
        super().__init__()
        self.goals = gym.spaces.Dict({"cell": gym.spaces.Discrete(1000), "row": gym.spaces.Discrete(2)})

    def reset(self, *, seed=None, options=None):
        self.goals.seed(seed)
        return super().reset(seed=seed)

    def step(self, action):
        super().step(action)
        return np.array(self.goals.sample()["cell"]), 0.0, False, False, {}


class OwnMethod(Walk):
    """Attributes that hold no state."""

    def __init__(self):
        super().__init__()
        self.move, self.size, self.goals = self.step, len, gym.spaces.Dict({"row": gym.spaces.Discrete(2)})
        self.halves = (np.zeros(3), np.zeros(3))
        self.left, self.right = np.zeros((3, 2)).T  # views that have no element in common


def stacked():
    return FrameStackObservation(Walk(), 3, padding_type="zero")  # its queue begins with one array, three times


@pytest.mark.parametrize("make", [Walk, Twice, OwnMethod, Samples, stacked])
def test_a_snapshot_continues_the_episode_after_it_was_a_checkpoint(make):
    first, second = make(), make()
    for env, seed in ((first, 1), (second, 2)):
        env.reset(seed=seed)
        env.step(seed - 1)
    assert restore_layers(second, to_arrays(to_tensors(save_layers(first))))
    for action in (0, 1, 1, 0, 1):
        assert np.array_equal(first.step(action)[0], second.step(action)[0])


@pytest.mark.parametrize("make", [View, Parts, OtherDraws])
def test_an_environment_that_a_snapshot_cannot_hold_is_known_not_to_be_restored(make):
    first, second = make(), make()
    first.reset(seed=1)
    second.reset(seed=2)
    assert not restore_layers(second, save_layers(first))

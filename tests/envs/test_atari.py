"""Sticky actions: they follow ale-py's rule and are part of a snapshot."""

import ale_py
import numpy as np
import pytest
from ale_py import roms
from toys import play, same

from a2c.config.config import Config
from a2c.envs.single import find_spec, make_env
from a2c.envs.snapshot import SnapshotWrapper

BREAKOUT = "ALE/Breakout-v5"


def game(sticky, seed=0):
    env = SnapshotWrapper(make_env(Config(env=BREAKOUT, sticky_actions=sticky, noop_max=5), find_spec(BREAKOUT), seed))
    env.reset(seed=seed)
    return env


def played(env, actions):
    """What each step returned, and the emulator's state after the last."""
    return play(env, actions), env.unwrapped.ale.cloneState(include_rng=True).serialize()


@pytest.mark.parametrize(
    ("sticky", "restores", "decisions"),
    [
        (0.9, 100, 8),
        pytest.param(0.9, 150, 50, marks=pytest.mark.slow),
        pytest.param(0.5, 150, 50, marks=pytest.mark.slow),
    ],
)
def test_atari_game_with_sticky_actions_is_restored_exactly(sticky, restores, decisions):
    straight, restored = game(sticky), game(sticky, seed=1)
    random = np.random.default_rng(2)
    parted = 0
    for _ in range(restores):
        snapshot, actions = straight.snapshot, random.integers(4, size=decisions)
        restored.snapshot = snapshot
        assert restored.exact
        parted += not same(played(straight, actions), played(restored, actions))
    assert parted == 0


@pytest.mark.parametrize("sticky", [0.25, 0.9])
def test_atari_game_repeats_the_last_action_with_the_probability_of_sticky_actions(sticky):
    env, frames, repeated = game(sticky).unwrapped, 3000, 0
    for _ in range(frames):
        wanted = (env.accepted + 1) % 4
        if env.ale.game_over():
            env.ale.reset_game()
        env._emulate(wanted)
        repeated += env.accepted != wanted
    assert abs(repeated / frames - sticky) < 4 * (sticky * (1 - sticky) / frames) ** 0.5


def frames_until_the_paddle_moves(act, ale):
    start = ale.getRAM()[72]
    for frame in range(200):
        act()
        if ale.getRAM()[72] != start:
            return frame
    return 200


def test_atari_game_delays_actions_as_the_emulator_s_own_sticky_actions_do():
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", 5)
    ale.setFloat("repeat_action_probability", 0.9)
    ale.loadROM(roms.get_rom_path("breakout"))
    env = game(0.9).unwrapped
    theirs, ours = [], []
    for _ in range(250):
        ale.reset_game()
        env.ale.reset_game()
        env.accepted = 0
        theirs.append(frames_until_the_paddle_moves(lambda: ale.act(ale_py.Action.RIGHT), ale))
        ours.append(frames_until_the_paddle_moves(lambda: env._emulate(2), env.ale))
    error = (np.var(theirs) / len(theirs) + np.var(ours) / len(ours)) ** 0.5  # of the difference of the means
    assert 8 < np.mean(theirs) < 14 and abs(np.mean(theirs) - np.mean(ours)) < 3.5 * error
    assert abs(np.log(np.std(theirs) / np.std(ours))) < 0.4


@pytest.mark.parametrize("sticky", [0.0, 1.0])
def test_atari_game_starts_with_the_no_op_and_repeats_it_instead_of_fire(sticky):
    env = game(sticky).unwrapped
    assert env.accepted == (0 if sticky else env.fire)
    for _ in range(3):
        env.step(3)
    assert env.accepted == (0 if sticky else 3)
    env.reset()
    assert env.accepted == (0 if sticky else env.fire)


def test_atari_game_without_sticky_actions_draws_no_random_number():
    env = game(0.0)
    before = env.unwrapped.np_random.bit_generator.state
    for _ in range(5):
        env.step(2)
    assert env.unwrapped.np_random.bit_generator.state == before
    assert env.unwrapped.get_action_meanings() == ["NOOP", "FIRE", "RIGHT", "LEFT"]


def plain_game(env="BreakoutNoFrameskip-v4", **changes):
    config = Config(env=env, frame_size=42, **{"noop_max": 0, **changes})
    return make_env(config, find_spec(env), 0)


def test_atari_game_forgets_the_accepted_action_at_a_reset():
    env = plain_game(sticky_actions=1.0)
    env.reset(seed=0)
    env.accepted = 3  # of the last episode
    env.reset()
    assert env.accepted == 0


def test_an_episode_longer_than_a_lowered_limit_is_truncated_at_its_next_step():
    env = plain_game(max_episode_frames=40)
    env.reset(seed=0)
    env.decisions = 25  # a run was resumed with a shorter limit
    assert env.step(0)[3]


@pytest.mark.parametrize("env", ["BreakoutNoFrameskip-v4", BREAKOUT])
def test_atari_game_has_no_limit_of_the_emulator_s_own_which_would_end_it_as_terminated(env):
    assert find_spec(env).kwargs["max_num_frames_per_episode"] == 108_000
    assert plain_game(env).ale.getInt("max_num_frames_per_episode") == 0


def test_noop_max_of_1_is_one_no_op():
    env, actions = plain_game("PongNoFrameskip-v4", noop_max=1), []
    emulate = env._emulate
    env._emulate = lambda action: actions.append(int(action)) or emulate(action)
    env.reset(seed=0)
    assert actions == [0, env.fire]


def test_no_ops_that_end_the_game_begin_another():
    env, calls = plain_game("PongNoFrameskip-v4", noop_max=1), []
    emulate = env._emulate

    def lose(action):
        calls.append(action)
        while len(calls) == 1 and not env.ale.game_over():
            env.ale.act(env._action_set[0])
        return emulate(action)

    env._emulate = lose
    env.reset(seed=0)
    assert not env.ale.game_over() and not env.step(0)[2]

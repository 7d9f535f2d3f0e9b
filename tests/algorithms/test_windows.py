"""Sliding windows: every decision in exactly one n-step transition, with the right reward and last state."""

import numpy as np
import pytest
import torch
from experience import GAMMA, blank, random_rollout, time_slice, window

from a2c.algorithms.windows import SlidingWindows
from a2c.transitions import Experience


def test_sliding_windows_by_hand():
    # Windows of 3 over ten decisions of one environment, obs[t] = t and reward 2^t discounted by 1/2, so
    # that each full window sums to 3 * 2^t. Terminated at 4, cut off at 6 with 99 as its last observation.
    rollout = blank(10, 1, features=1)
    rollout.obs[:, 0, 0], rollout.next_obs[0, 0] = torch.arange(10), 10
    rollout.actions[:, 0] = torch.arange(10)
    rollout.rewards[:, 0] = 2.0 ** torch.arange(10)
    rollout.terminated[4], rollout.truncated[6] = True, True
    rollout.final_index, rollout.final_obs = torch.tensor([[6, 0]]), torch.tensor([[99]], dtype=torch.uint8)
    rollout.final_rnn_state = torch.zeros(1, 0)
    windows = SlidingWindows(1, reward_steps=3, batch_size=2, gamma=0.5, reward_clip=0.0)
    first, second = windows.push(time_slice(rollout, 0, 9)), windows.push(time_slice(rollout, 9, 10))

    def read(e: Experience) -> tuple:
        return int(e.state), e.action, e.reward, None if e.last_state is None else int(e.last_state), e.reward_steps

    assert [[read(e) for e in batch.items] for batch in first] == [
        [(0, 0, 3.0, 3, 3), (1, 1, 6.0, 4, 3)],
        [(2, 2, 12.0, None, 3), (3, 3, 16.0, None, 2)],
        [(4, 4, 16.0, None, 1), (5, 5, 64.0, 99, 2)],
    ]
    # 7 and 8 wait for decision 9; then 7 is whole and fills the batch that 6 began.
    assert [[read(e) for e in batch.items] for batch in second] == [[(6, 6, 64.0, 99, 1), (7, 7, 384.0, 10, 3)]]


@pytest.mark.parametrize("seed", range(5))
def test_sliding_windows_lose_and_double_no_transition(seed):
    steps, envs, batch_size = 24, 3, 7
    rollout = random_rollout(steps, envs, seed, rate=0.08)
    windows, batches = SlidingWindows(envs, 4, batch_size, GAMMA, reward_clip=0.0), []
    for low in range(0, steps, 6):
        piece = time_slice(rollout, low, low + 6)
        batches += windows.push(piece)
        piece.obs.zero_(), piece.next_obs.zero_()  # the collector plays into the same memory again
    assert all(len(batch) == batch_size for batch in batches)
    assert len(windows.complete) < batch_size
    emitted = [e for batch in batches for e in batch.items] + windows.complete
    names = [tuple(e.state[:2].tolist()) for e in emitted]
    expected = {(t, n): window(rollout, t, n, 4) for t in range(steps) for n in range(envs)}
    assert sorted(names) == sorted(key for key, e in expected.items() if e is not None)
    assert sum(map(len, windows.open)) == sum(e is None for e in expected.values())
    for name, got in zip(names, emitted, strict=True):
        want = expected[name]
        assert (got.action, got.reward_steps) == (want.action, want.reward_steps)
        assert got.reward == pytest.approx(want.reward, abs=1e-5)
        np.testing.assert_array_equal(got.state, want.state)
        assert (got.last_state is None) == (want.last_state is None)
        if want.last_state is not None:
            np.testing.assert_array_equal(got.last_state, want.last_state)


def test_sliding_windows_clip_each_reward_once_before_discounting():
    rollout = blank(3, 1)
    rollout.rewards = torch.tensor([[4.0], [-5.0], [0.5]])
    ((window,),) = (batch.items for batch in SlidingWindows(1, 3, 1, gamma=0.5, reward_clip=1.0).push(rollout))
    assert window.reward == 1 - 0.5 + 0.125


def test_sliding_windows_of_a_resumed_run_that_are_too_long_end_with_the_next_decision():
    rollout = blank(5, 1)
    rollout.rewards[:, 0] = 2.0 ** torch.arange(5)
    rollout.actions[:, 0] = torch.arange(5)
    before = SlidingWindows(1, reward_steps=4, batch_size=1, gamma=0.5, reward_clip=0.0)
    assert not before.push(time_slice(rollout, 0, 3))
    windows = SlidingWindows(1, reward_steps=2, batch_size=1, gamma=0.5, reward_clip=0.0)
    windows.load_state_dict(before.state_dict())
    batches = windows.push(time_slice(rollout, 3, 4)) + windows.push(time_slice(rollout, 4, 5))
    got = [(e.action, e.reward, e.reward_steps) for batch in batches for e in batch.items]
    assert got == [(0, 4.0, 4), (1, 6.0, 3), (2, 8.0, 2), (3, 16.0, 2)]
    assert len(windows.open[0]) == 1

"""The lambda-return against hand-computed columns, a slow oracle and its own identities."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from a2c.returns import lambda_returns

# Three steps of one environment; gamma = 0.5 keeps every number exact in binary.
REWARDS, NEXT_VALUES = [1.0, 2.0, 4.0], [8.0, 16.0, 32.0]


def column(numbers: list, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype).unsqueeze(1)  # [T, 1]


def random_rollout(steps: int, envs: int, seed: int, rate: float = 0.3) -> dict[str, Tensor]:
    """Random float64 arguments, with about `rate` terminations and as many truncations."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.rand(steps, envs, generator=generator, dtype=torch.float64)

    return {
        "rewards": draw() * 4 - 2,
        "next_values": draw() * 20 - 10,
        "terminated": draw() < rate,
        "truncated": draw() < rate,
    }


def paper_returns(
    rewards: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Forward view: (1 - lambda) * sum lambda^(n-1) * G(n), the rest of the weight on the longest n-step return."""
    steps, envs = rewards.shape
    returns = torch.zeros(steps, envs, dtype=torch.float64)
    for e in range(envs):
        for t in range(steps):
            ends = [k for k in range(t, steps) if terminated[k, e] or truncated[k, e]]
            longest = (ends[0] if ends else steps - 1) - t + 1
            n_step = []
            for n in range(1, longest + 1):
                last = t + n - 1
                value = 0.0 if terminated[last, e] else float(next_values[last, e])
                n_step.append(sum(gamma**i * float(rewards[t + i, e]) for i in range(n)) + gamma**n * value)
            mixed = (1 - gae_lambda) * sum(gae_lambda**i * g for i, g in enumerate(n_step[:-1]))
            returns[t, e] = mixed + gae_lambda ** (longest - 1) * n_step[-1]
    return returns


@pytest.mark.parametrize(
    ("gae_lambda", "terminated", "truncated", "expected"),
    [
        # 4 + 32/2 = 20; 2 + 20/2 = 12; 1 + 12/2 = 7
        (1.0, [0, 0, 0], [0, 0, 0], [7.0, 12.0, 20.0]),
        # the episode ends in the middle: 2 alone, then 1 + 2/2
        (1.0, [0, 1, 0], [0, 0, 0], [2.0, 2.0, 20.0]),
        # cut off in the middle: 2 + 16/2 = 10, then 1 + 10/2
        (1.0, [0, 0, 0], [0, 1, 0], [6.0, 10.0, 20.0]),
        # both flags at once: the terminated flag counts
        (1.0, [0, 1, 0], [0, 1, 0], [2.0, 2.0, 20.0]),
        # the same at lambda = 0.5: 2 + (16/2 + 20/2)/2 = 11; 1 + (8/2 + 11/2)/2 = 5.75
        (0.5, [0, 0, 0], [0, 0, 0], [5.75, 11.0, 20.0]),
        # 1 + (8/2 + 2/2)/2
        (0.5, [0, 1, 0], [0, 0, 0], [3.5, 2.0, 20.0]),
        # 1 + (8/2 + 10/2)/2
        (0.5, [0, 0, 0], [0, 1, 0], [5.5, 10.0, 20.0]),
        (0.5, [0, 1, 0], [0, 1, 0], [3.5, 2.0, 20.0]),
        # flags on the last step
        (1.0, [0, 0, 1], [0, 0, 0], [3.0, 4.0, 4.0]),
        (1.0, [0, 0, 0], [0, 0, 1], [7.0, 12.0, 20.0]),
    ],
)
def test_lambda_returns_by_hand(gae_lambda, terminated, truncated, expected):
    flags = column(terminated, torch.bool), column(truncated, torch.bool)
    got = lambda_returns(column(REWARDS), column(NEXT_VALUES), *flags, gamma=0.5, gae_lambda=gae_lambda)
    assert torch.equal(got, column(expected))


@settings(max_examples=300, deadline=None)
@given(
    steps=st.integers(1, 8),
    envs=st.integers(1, 3),
    gamma=st.floats(0, 1),
    gae_lambda=st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1)),
    seed=st.integers(0, 2**31),
    rate=st.sampled_from([0.0, 0.1, 0.4]),
)
def test_lambda_returns_equal_the_forward_view(steps, envs, gamma, gae_lambda, seed, rate):
    rollout = random_rollout(steps, envs, seed, rate)
    got = lambda_returns(**rollout, gamma=gamma, gae_lambda=gae_lambda)
    assert got.dtype == torch.float64  # else the tolerance below would mean nothing
    torch.testing.assert_close(got, paper_returns(**rollout, gamma=gamma, gae_lambda=gae_lambda), rtol=1e-10, atol=1e-9)


def test_lambda_returns_at_1_are_n_step_returns():
    rollout = random_rollout(6, 4, seed=1, rate=0.0)
    n_step = sum(0.9**t * rollout["rewards"][t] for t in range(6)) + 0.9**6 * rollout["next_values"][-1]
    torch.testing.assert_close(lambda_returns(**rollout, gamma=0.9, gae_lambda=1.0)[0], n_step)


def test_lambda_returns_at_0_are_td_0():
    rollout = random_rollout(6, 4, seed=2)
    td = rollout["rewards"] + 0.9 * rollout["next_values"] * ~rollout["terminated"]
    torch.testing.assert_close(lambda_returns(**rollout, gamma=0.9, gae_lambda=0.0), td)


def test_lambda_returns_of_n_environments_equal_n_times_one():
    rollout = random_rollout(7, 5, seed=3)
    together = lambda_returns(**rollout, gae_lambda=0.8)
    alone = [lambda_returns(**{k: v[:, n : n + 1] for k, v in rollout.items()}, gae_lambda=0.8) for n in range(5)]
    assert torch.equal(together, torch.cat(alone, dim=1))


@pytest.mark.parametrize("gae_lambda", [1.0, 0.5])
def test_lambda_returns_count_a_lone_terminal_reward(gae_lambda):
    # Without values, a reward at the end reaches back with weight (gamma * lambda)^k.
    steps = 5
    rewards, none = torch.zeros(steps, 1), torch.zeros(steps, 1, dtype=torch.bool)
    rewards[-1] = 1.0
    terminated = none.clone()
    terminated[-1] = True
    got = lambda_returns(rewards, torch.zeros(steps, 1), terminated, none, gamma=0.5, gae_lambda=gae_lambda)
    assert got.flatten().tolist() == [(0.5 * gae_lambda) ** k for k in reversed(range(steps))]


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
def test_lambda_returns_do_not_cross_the_end_of_an_episode(flag, gae_lambda):
    before = random_rollout(8, 2, seed=4, rate=0.0)
    before[flag][3, 0] = True
    after = {k: v.clone() for k, v in before.items()}
    other = random_rollout(8, 2, seed=5, rate=0.5)
    for name, tensor in after.items():
        tensor[4:, 0] = other[name][4:, 0]
    old, new = (lambda_returns(**r, gamma=0.99, gae_lambda=gae_lambda) for r in (before, after))
    assert torch.equal(old[:4], new[:4])
    assert torch.equal(old[:, 1], new[:, 1])
    assert not torch.isclose(old[4:, 0], new[4:, 0]).any()  # the change was felt where it should be


@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
def test_lambda_returns_ignore_nan_values_after_a_terminated_step(gae_lambda):
    rollout = random_rollout(8, 3, seed=6)
    rollout["terminated"][-1, 0] = True
    clean = lambda_returns(**rollout, gae_lambda=gae_lambda)
    rollout["next_values"][rollout["terminated"]] = torch.nan
    assert torch.equal(lambda_returns(**rollout, gae_lambda=gae_lambda), clean)


def test_lambda_returns_minus_values_are_the_generalised_advantages():
    rollout = random_rollout(9, 3, seed=7)
    ended = rollout["terminated"] | rollout["truncated"]
    values = random_rollout(9, 3, seed=8)["next_values"]
    # V of the next observation, except where an episode ended: there it is V of the final one.
    next_values = torch.where(ended, rollout["next_values"], values.roll(-1, 0))
    deltas = rollout["rewards"] + 0.97 * next_values * ~rollout["terminated"] - values
    advantages, tail = torch.zeros_like(values), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(9)):
        tail = deltas[t] + 0.97 * 0.9 * tail * ~ended[t]
        advantages[t] = tail
    returns = lambda_returns(**{**rollout, "next_values": next_values}, gamma=0.97, gae_lambda=0.9)
    torch.testing.assert_close(returns - values, advantages)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(3)}, "rewards must have shape"),
        ({"rewards": torch.zeros(0, 2)}, "rewards must have shape"),
        ({"next_values": torch.zeros(3, 1)}, "next_values must have the shape"),
        ({"next_values": torch.zeros(4, 2)}, "next_values must have the shape"),
        ({"next_values": torch.zeros(3, 2, dtype=torch.int64)}, "next_values must be floating point, got torch.int64"),
        ({"terminated": torch.zeros(1, 2, dtype=torch.bool)}, "terminated must have the shape"),
        ({"truncated": torch.zeros(2, 3, dtype=torch.bool)}, "truncated must have the shape"),
        ({"terminated": torch.zeros(3, 2)}, "terminated must be bool"),
        ({"truncated": torch.zeros(3, 2, dtype=torch.uint8)}, "truncated must be bool"),
        ({"gamma": 1.01}, "gamma must be .*1.01"),
        ({"gamma": float("nan")}, "gamma must be .*nan"),
        ({"gae_lambda": -0.1}, "gae_lambda must be .*-0.1"),
    ],
)
def test_lambda_returns_refuse_bad_inputs_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        lambda_returns(**{**random_rollout(3, 2, seed=9), **change})

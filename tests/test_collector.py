"""The collector stores what happened: which observation, which action, which reward, which end."""

import copy

import numpy as np
import pytest
import torch
from toys import CertainNet, TinyNet, counting_envs

from a2c.collector import Collector, Played
from a2c.compute.compute import Compute
from a2c.config.config import Config


@pytest.fixture(params=[1, 2])
def compute(request):
    """One or two compute threads; no test may tell them apart."""
    compute = Compute(Config(backend="sync", precision="float32", threads=request.param))
    yield compute
    compute.close()


def collector(compute, *groups, net=None, steps=7, seed=0):
    return Collector(groups, net or TinyNet(), steps, compute, seed)


def kept(rollout):
    """A copy: the collector writes the next rollout into the same buffers."""
    return copy.deepcopy(rollout)


def test_collect_stores_the_reward_beside_the_observation_and_action_that_earned_it(compute):
    rollout = collector(compute, counting_envs(3, 4, 100)).collect().rollout
    index, _, step = rollout.obs.long().unbind(2)
    assert torch.equal(index, torch.arange(3).expand(7, 3))
    assert torch.equal(
        step, torch.tensor([[0, 0, 0], [1, 1, 1], [2, 2, 2], [0, 3, 3], [1, 0, 4], [2, 1, 5], [0, 2, 6]])
    )
    assert torch.equal(rollout.rewards, 10.0 * step + rollout.actions)
    assert len(rollout.actions.unique()) > 2
    assert rollout.next_obs.tolist() == [[0, 2, 1], [1, 1, 3], [2, 0, 7]]


@pytest.mark.parametrize("ends", ["terminated", "truncated", "terminated and truncated"])
def test_collect_aligns_flags_and_starts(compute, ends):
    rollout = collector(compute, counting_envs(3, 4, ends=ends)).collect().rollout
    over = torch.tensor([[0, 0], [0, 0], [1, 0], [0, 1], [0, 0], [1, 0], [0, 0]]).bool()
    none = torch.zeros_like(over)
    assert torch.equal(rollout.terminated, over if "terminated" in ends else none)
    assert torch.equal(rollout.truncated, over if "truncated" in ends else none)
    starts = torch.cat([torch.ones(1, 2).bool(), over[:-1]])  # after each end, and at the very beginning
    assert torch.equal(rollout.starts, starts)
    assert torch.equal(rollout.starts, rollout.obs[:, :, 2] == 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_collect_keeps_the_dtype_of_observations(compute, dtype):
    rollout = collector(compute, counting_envs(2, 3, ends="truncated", dtype=dtype)).collect().rollout
    expected = torch.from_numpy(np.zeros(0, dtype)).dtype
    assert rollout.obs.dtype == rollout.next_obs.dtype == rollout.final_obs.dtype == expected
    assert rollout.actions.dtype == rollout.final_index.dtype == torch.int64
    assert rollout.rewards.dtype == rollout.values.dtype == rollout.log_probs.dtype == torch.float32


def test_collect_returns_the_final_observations_of_truncated_steps(compute):
    rollout = collector(compute, counting_envs(3, 4, ends="truncated")).collect().rollout
    assert rollout.final_index.tolist() == [[2, 0], [3, 1], [5, 0]]
    assert rollout.final_obs.tolist() == [[0, 0, 3], [1, 0, 4], [0, 1, 3]]  # the step that no obs[t] shows


@pytest.mark.parametrize("ends", ["terminated", "terminated and truncated"])
def test_collect_returns_no_final_observation_of_a_terminated_step(compute, ends):
    # It is not bootstrapped, whatever the truncation flag says.
    rollout = collector(compute, counting_envs(3, 4, ends=ends)).collect().rollout
    assert rollout.final_index.shape == (0, 2) and rollout.final_obs.shape == (0, 3)


def test_collect_twice_equals_one_long_rollout(compute):
    long = collector(compute, counting_envs(3, 4, ends="truncated"), steps=8).collect()
    halves = collector(compute, counting_envs(3, 4, ends="truncated"), steps=4)
    first, second = kept(halves.collect()), kept(halves.collect())
    whole, left, right = long.rollout, first.rollout, second.rollout
    for name in ("obs", "actions", "rewards", "terminated", "truncated", "starts", "values", "log_probs"):
        assert torch.equal(torch.cat([getattr(left, name), getattr(right, name)]), getattr(whole, name)), name
    assert torch.equal(right.next_obs, whole.next_obs)
    assert torch.equal(torch.cat([left.final_index, right.final_index + torch.tensor([4, 0])]), whole.final_index)
    assert torch.equal(torch.cat([left.final_obs, right.final_obs]), whole.final_obs)
    later = [episode._replace(t=episode.t + 4) for episode in second.episodes]
    assert first.episodes + later == long.episodes


def test_collect_lays_out_groups_of_environments_like_one(compute):
    # A net without chance, because each group draws its actions from a generator of its own.
    net, lengths = CertainNet(), (3, 4, 5, 2, 6)
    whole = collector(compute, counting_envs(*lengths, ends="truncated"), net=net)
    parts = (counting_envs(*lengths[:3], ends="truncated"), counting_envs(*lengths[3:], ends="truncated", first=3))
    groups = collector(compute, *parts, net=net)
    for _ in range(2):
        one, two = whole.collect(), groups.collect()
        for name, tensor in vars(one.rollout).items():
            assert torch.equal(tensor, getattr(two.rollout, name)), name
        assert one.episodes == two.episodes


def test_collect_draws_different_actions_in_each_group(compute):
    groups = (counting_envs(100, 100), counting_envs(100, 100))  # the same observations in both
    rollout = collector(compute, *groups, steps=20).collect().rollout
    assert torch.equal(rollout.obs[:, :2], rollout.obs[:, 2:])
    assert not torch.equal(rollout.actions[:, :2], rollout.actions[:, 2:])


def test_collect_stores_values_and_log_probs_of_the_acting_network(compute):
    net = TinyNet(seed=1)
    envs = counting_envs(3, 4, ends="truncated")
    rollout = collector(compute, envs, net=net).collect().rollout
    assert len(rollout.final_obs) == 3
    logits, values = net(rollout.obs.flatten(0, 1))
    log_probs = logits.log_softmax(1).gather(1, rollout.actions.flatten()[:, None])
    torch.testing.assert_close(rollout.values.flatten(), values.squeeze(1))
    torch.testing.assert_close(rollout.log_probs.flatten(), log_probs.squeeze(1))
    assert not rollout.values.requires_grad and not rollout.log_probs.requires_grad


def test_collect_draws_noise_for_each_environment_and_rollout_and_stores_the_log_probs_of_what_acted(compute):
    net = TinyNet(seed=1)
    with_noise = collector(compute, counting_envs(9, 9), counting_envs(9), net=net, steps=40)
    noises = []
    for _ in range(2):
        rollout = with_noise.collect(noise=1.5).rollout
        noises.append(torch.cat([policy.noise for policy in with_noise.policies]))  # [3, 5]
        log_probs = (net(rollout.obs.flatten(0, 1))[0].view(40, 3, 5) + noises[-1]).log_softmax(2)
        torch.testing.assert_close(rollout.log_probs, log_probs.gather(2, rollout.actions[:, :, None]).squeeze(2))
    assert len({round(float(value), 5) for value in torch.cat(noises).flatten()}) == 30
    plain = with_noise.collect().rollout
    log_probs = net(plain.obs.flatten(0, 1))[0].view(40, 3, 5).log_softmax(2)
    torch.testing.assert_close(plain.log_probs, log_probs.gather(2, plain.actions[:, :, None]).squeeze(2))


def test_collect_numbers_the_environments_of_episodes_over_all_groups(compute):
    collected = collector(compute, counting_envs(100, 4), counting_envs(3, first=2), net=CertainNet()).collect()
    # Rewards are 10 * step + (index + step) % 5.
    assert collected.episodes == [(2, 39.0, 3, 2), (1, 70.0, 4, 3), (2, 39.0, 3, 5)]


def test_collect_stores_the_policy_version(compute):
    rollout = collector(compute, counting_envs(3, 4)).collect(policy_version=17).rollout
    assert rollout.policy_version.tolist() == [17, 17]


def test_collect_returns_the_mean_seconds_of_the_groups(compute):
    both = collector(compute, counting_envs(3), counting_envs(4))
    both._play = lambda g: Played([], [], [1.0, 3.0][g], [4.0, 6.0][g])
    assert both.collect().seconds == {"env": 2.0, "act": 5.0}

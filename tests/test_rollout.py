"""The collector writes down what happened: which observation, which action, which reward, which end."""

import copy

import numpy as np
import pytest
import torch
from toys import N_ACTIONS, CertainNet, TinyNet, counting_envs

from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.policy import Policy


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
    starts = torch.cat([torch.ones(1, 2).bool(), over[:-1]])  # behind each end, and at the very beginning
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
    assert first.episodes + second.episodes == long.episodes


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
        assert sorted(one.episodes) == sorted(two.episodes)


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


def test_collect_numbers_the_environments_of_episodes_over_all_groups(compute):
    collected = collector(compute, counting_envs(100, 4), counting_envs(3, first=2), net=CertainNet()).collect()
    # Rewards are 10 * step + (index + step) % 5.
    assert sorted(collected.episodes) == [(1, 70.0, 4), (2, 39.0, 3), (2, 39.0, 3)]


def test_collect_stores_the_policy_version(compute):
    rollout = collector(compute, counting_envs(3, 4)).collect(policy_version=17).rollout
    assert rollout.policy_version.tolist() == [17, 17] and rollout.policy_lag(20) == 3


def test_split_keeps_whole_windows_and_renumbers_final_observations(compute):
    rollout = collector(compute, counting_envs(3, 4, 5, 2, 6, ends="truncated")).collect().rollout
    parts = rollout.split(2)
    assert [part.actions.shape for part in parts] == [(7, 3), (7, 2)]
    assert sum(len(part) for part in parts) == len(rollout) == 35
    names = ("obs", "actions", "rewards", "terminated", "truncated", "starts", "values", "log_probs")
    for name in names:
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], 1), getattr(rollout, name)), name
    assert parts[1].obs.data_ptr() == rollout.obs[:, 3:].data_ptr()  # a view
    assert torch.equal(torch.cat([part.next_obs for part in parts]), rollout.next_obs)
    assert sum(len(part.final_index) for part in parts) == len(rollout.final_index) > 5
    for low, part in zip((0, 3), parts, strict=True):
        t, n = part.final_index.unbind(1)
        assert part.truncated[t, n].all() and part.truncated.sum() == len(t)
        assert torch.equal(part.final_obs[:, 0], (n + low).to(torch.uint8))  # an observation names its environment


def test_to_copies_all_tensors_but_those_that_stay_on_the_host(compute):
    # A tensor on the device "meta" has no numbers, so nothing that was left out can pass for it.
    rollout = collector(compute, counting_envs(3, 4, ends="truncated")).collect().rollout
    on_device = rollout.to(torch.device("meta"))
    assert on_device.policy_version is rollout.policy_version
    tensors = {name: value for name, value in vars(rollout).items() if name != "policy_version"}
    assert len(tensors) == 14
    for name, before in tensors.items():
        after = getattr(on_device, name)
        assert (after.device.type, after.shape, after.dtype) == ("meta", before.shape, before.dtype), name
    back = rollout.to(torch.device("cpu"))
    assert all(torch.equal(getattr(back, name), before) for name, before in tensors.items())


def test_split_into_more_parts_than_environments_gives_one_each(compute):
    rollout = collector(compute, counting_envs(3, 4)).collect().rollout
    assert [part.actions.shape for part in rollout.split(9)] == [(7, 1), (7, 1)]


def test_act_samples_by_the_policy_and_the_seed():
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    logits = probabilities.log().clamp(min=-1e9).expand(20_000, N_ACTIONS) + 3.0  # a shift changes nothing

    def draw(seed):
        policy = Policy(lambda obs: (obs, torch.zeros(len(obs), 1)), 20_000, "cpu", seed)
        return policy.act(logits, torch.zeros(20_000, dtype=torch.bool))[:2]

    actions, log_probs = draw(0)
    assert actions.shape == log_probs.shape == (20_000,) and actions.dtype == torch.int64
    counts = torch.bincount(actions, minlength=N_ACTIONS)
    # Pearson's statistic with 3 degrees of freedom is below 20 but for one seed in five thousand.
    expected = 20_000 * probabilities[:4]
    assert counts[4] == 0 and ((counts[:4] - expected) ** 2 / expected).sum() < 20
    torch.testing.assert_close(log_probs, probabilities.log()[actions])
    assert torch.equal(actions, draw(0)[0]) and not torch.equal(actions, draw(1)[0])

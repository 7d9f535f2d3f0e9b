"""A rollout: split by environment, and on another device."""

from contextlib import closing

import pytest
import torch
from experience import random_rollout
from toys import TinyNet, counting_envs

from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.networks import LstmA2C, MlpA2C
from a2c.policy import step


@pytest.fixture
def collect():
    """A function that collects one rollout of 7 decisions from the environments that it gets."""
    with closing(Compute(Config(backend="sync", precision="float32", threads=1))) as compute:
        yield lambda envs: Collector([envs], TinyNet(), 7, compute).collect().rollout


def test_split_keeps_whole_windows_and_renumbers_final_observations(collect):
    rollout = collect(counting_envs(3, 4, 5, 2, 6, ends="truncated"))
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


def test_to_copies_all_tensors_but_those_that_stay_on_the_host(collect):
    # A tensor on the device "meta" has no numbers, so nothing that was left out can pass for it.
    rollout = collect(counting_envs(3, 4, ends="truncated"))
    on_device = rollout.to(torch.device("meta"))
    on_host = {"policy_version", "final_index"}
    assert all(getattr(on_device, name) is getattr(rollout, name) for name in on_host)
    tensors = {name: value for name, value in vars(rollout).items() if name not in on_host}
    assert len(tensors) == 13
    for name, before in tensors.items():
        after = getattr(on_device, name)
        assert (after.device.type, after.shape, after.dtype) == ("meta", before.shape, before.dtype), name
    back = rollout.to(torch.device("cpu"))
    assert all(torch.equal(getattr(back, name), before) for name, before in tensors.items())


def test_split_into_more_parts_than_environments_gives_one_each(collect):
    rollout = collect(counting_envs(3, 4))
    assert [part.actions.shape for part in rollout.split(9)] == [(7, 1), (7, 1)]


@pytest.mark.parametrize("parts", [1, 3, 9])
@pytest.mark.parametrize("recurrent", [False, True])
def test_valued_by_asks_the_network_for_every_decision_and_leaves_the_rollout_alone(recurrent, parts):
    rollout = random_rollout(steps=6, envs=5, seed=1)
    net = LstmA2C((4,), 3, 7) if recurrent else MlpA2C((4,), 3)
    rollout.rnn_state = torch.randn(5, 14) if recurrent else torch.empty(5, 0)
    rollout.obs, rollout.starts[3, 1:3] = rollout.obs / 256, True
    before = rollout.values.clone()
    valued = rollout.valued_by(net, parts, map)
    state, expected = rollout.rnn_state, []
    with torch.no_grad():
        for obs, starts in zip(rollout.obs, rollout.starts, strict=True):
            _, values, state = step(net, obs, state, starts)
            expected.append(values[:, 0])
    torch.testing.assert_close(valued.values, torch.stack(expected))
    assert not valued.values.requires_grad and valued.obs is rollout.obs
    assert torch.equal(rollout.values, before)


@pytest.mark.parametrize("recurrent", [False, True])
def test_batch_has_the_returns_by_the_values_of_its_own_pass(recurrent):
    rollout = random_rollout(steps=6, envs=5, seed=1)
    net = LstmA2C((4,), 3, 7) if recurrent else MlpA2C((4,), 3)
    rollout.rnn_state = torch.randn(5, 14) if recurrent else torch.empty(5, 0)
    rollout.next_rnn_state = torch.randn_like(rollout.rnn_state)
    rollout.final_rnn_state = torch.randn(len(rollout.final_index), rollout.rnn_state.shape[1])
    rollout.obs, rollout.starts[3, 1:3] = rollout.obs / 256, True
    acting = rollout.values.clone()
    batch = rollout.batch(net, 0.9, 0.8, 0.0, off_policy=False)
    valued = rollout.valued_by(net, 1, map)
    torch.testing.assert_close(batch.values, valued.values.flatten())
    torch.testing.assert_close(batch.returns, valued.returns(net, 0.9, 0.8, 0.0).flatten())
    assert batch.values.requires_grad and not batch.returns.requires_grad
    assert torch.equal(rollout.values, acting)

"""What crosses to the device: stacks that are built there equal those of the environments, bit for bit."""

from contextlib import closing

import numpy as np
import pytest
import torch
from crossings import crossings
from fake_device import DEVICE, FakeDevice
from toys import counting_envs

from a2c.compute.staging import Staging, to_device
from a2c.config.config import Config
from a2c.envs.make import make_envs

SMALL = {"frame_size": 36, "num_envs": 3, "max_episode_frames": 44, "threads": 1, "noop_max": 5}


@pytest.mark.parametrize("backend", ["native", "sync", "async"])
@pytest.mark.parametrize("lives", [False, True], ids=["episodes", "lives"])
def test_stacks_built_from_the_newest_frame_equal_those_of_the_environments(backend, lives):
    # Episodes last 11 decisions at most here; random play at Breakout loses its lives within the longer ones.
    settings = SMALL | ({"max_episode_frames": 2000} if lives else {})
    config = Config(env="BreakoutNoFrameskip-v4", backend=backend, terminal_on_life_loss=lives, **settings)
    ends, episodes = 0, 0
    with closing(make_envs(config)) as envs:
        assert envs.stacked
        for built, true, ended in crossings(envs, 150 if lives else 40):
            assert torch.equal(built, true)
            ends += ended.sum()
        episodes = 150 * 3 - envs.lengths.sum() if lives else ends
    assert ends > 6 and episodes


def test_a_stack_whose_episode_begins_is_wrong_without_the_whole_observation():
    # Otherwise the test above could not fail.
    config = Config(env="PongNoFrameskip-v4", backend="sync", **SMALL)
    with closing(make_envs(config)) as envs:
        rng, rows = np.random.default_rng(0), [torch.from_numpy(np.array(envs.reset()[0]))]
        staging, wrong = Staging(rows[0], True), 0
        for _ in range(12):
            obs, _, terminated, truncated, _ = envs.step(rng.integers(6, size=3))
            out = torch.empty_like(rows[0])
            staging.store(obs, np.zeros(3, bool), rows[-1], out)
            over = (terminated | truncated).any()
            wrong += bool(over) and not torch.equal(out, torch.from_numpy(obs))
            rows = [torch.from_numpy(np.array(obs))]
        assert wrong == 1


def test_other_observations_cross_whole():
    envs = counting_envs(3, 4)
    assert not envs.stacked
    staging = Staging(torch.zeros(2, 3, dtype=torch.uint8), newest_only=False)
    out, obs = torch.empty(2, 3, dtype=torch.uint8), np.arange(6, dtype=np.uint8).reshape(2, 3)
    staging.store(obs, np.zeros(2, bool), out, out)
    obs[:] = 0  # as a worker that writes the next one
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_single_numbers_cross_to_a_device():
    with FakeDevice():
        staging = Staging(torch.zeros(2, dtype=torch.uint8, device=DEVICE), newest_only=False)
        out = torch.zeros(2, dtype=torch.uint8, device=DEVICE)
        staging.store(np.array([5, 6], np.uint8), np.zeros(2, bool), out, out)
        assert out.value.tolist() == [5, 6]


@pytest.mark.parametrize("frames", [1, 2])
def test_stacks_of_few_frames(frames):
    config = Config(env="PongNoFrameskip-v4", backend="sync", frame_stack=frames, **SMALL)
    with closing(make_envs(config)) as envs:
        assert all(torch.equal(built, true) for built, true, _ in crossings(envs, 15))


def test_to_device_returns_the_tensor_itself_on_the_cpu():
    tensor = torch.arange(3)
    assert to_device(tensor, torch.device("cpu")) is tensor
    assert to_device(tensor, torch.device("meta")).device.type == "meta"


class Event:
    """Notes when it is used, and how many copies had been made for the host by then."""

    def __init__(self, mode):
        self.mode, self.log = mode, []

    def record(self):
        self.log.append(("record", self.mode.fetched))

    def synchronize(self):
        self.log.append(("synchronize", self.mode.fetched))


def test_actions_are_read_after_an_event_that_follows_their_copy():
    with FakeDevice() as mode:
        staging = Staging(torch.zeros(2, 3, dtype=torch.uint8, device=DEVICE), newest_only=False)
        staging.done = Event(mode)
        first = staging.actions_on_host(torch.tensor([1, 2]).to(DEVICE, non_blocking=True))
        assert first.tolist() == [1, 2] and staging.done.log == [("record", 1), ("synchronize", 1)]
        assert staging.actions_on_host(torch.tensor([3, 4]).to(DEVICE, non_blocking=True)) is not None
    assert first.tolist() == [3, 4]  # the same memory
    assert not mode.waits

"""Pixel statistics after very many frames, and of images in colour."""

from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
import torch

from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.envs.single import probe_spaces
from a2c.learner import Learner
from a2c.normalizers import FrameNorm, PixelNorm
from a2c.run.trainer import Trainer
from a2c.tools.evaluate import evaluate
from a2c.tools.load import load_policy

COLOURS = (20, 120, 220)  # mean of each channel
SIZE = 40


class ColourEnv(gym.Env):
    """Noise in three colours: red is dark and quiet, blue is bright and loud."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 20
        return self._picture(), {}

    def step(self, action):
        self.left -= 1
        return self._picture(), 1.0, self.left == 0, False, {}

    def _picture(self):
        noise = self.np_random.integers(-5, 6, self.observation_space.shape) * [1, 2, 3]
        return (noise + COLOURS).astype(np.uint8)


def test_pixel_norm_in_float32_does_not_change_its_statistics_in_a_call():
    norm = PixelNorm((3, 3)).float()  # then no copy is made of them for the call
    first, second = (norm(torch.full((1, 4, 3, 3), 200.0)) for _ in range(2))
    assert torch.equal(first, second) and (norm.var == 64.0**2).all()


@pytest.fixture
def colour_env():
    gym.register("Colours-v0", entry_point=ColourEnv)
    yield "Colours-v0"
    del gym.registry["Colours-v0"]


@pytest.mark.parametrize("count", [10**4, 10**8, 10**10])
def test_pixel_norm_update_changes_the_statistics_after_very_many_frames(count):
    # The reference merges the moments in float64 (Chan et al., 1983), one batch after the other.
    draw = np.random.default_rng(0)
    norm = PixelNorm((3, 4))
    mean, var = draw.uniform(0, 255, (3, 4)), draw.uniform(0, 2000, (3, 4))
    norm.mean.copy_(torch.from_numpy(mean)), norm.var.copy_(torch.from_numpy(var)), norm.count.fill_(count)
    frames = draw.integers(0, 256, (40, 250, 3, 4)).astype(np.uint8)
    before, total = (mean, var), count
    for batch in frames:
        norm.update(torch.from_numpy(batch))
        share = len(batch) / (total + len(batch))
        delta = batch.mean(0, dtype=np.float64) - mean
        var = var + share * (batch.var(0, dtype=np.float64) - var) + share * (1 - share) * delta**2
        mean, total = mean + share * delta, total + len(batch)
    assert int(norm.count) == total == count + 10_000
    for got, want, old in ((norm.mean, mean, before[0]), (norm.var, var, before[1])):
        moved = want - old
        assert np.abs(moved).min() > 0
        np.testing.assert_allclose(got.numpy() - old, moved, rtol=1e-4, atol=1e-6 * np.abs(moved).max())


def test_pixel_norm_normalises_ten_thousand_frames_as_numpy():
    norm, draw = PixelNorm((5, 6)), np.random.default_rng(0)
    frames = draw.integers(0, draw.integers(2, 257, (5, 6)), (40, 250, 5, 6)).astype(np.uint8)
    for batch in frames:
        norm.update(torch.from_numpy(batch))
    mean, var = frames.mean((0, 1), dtype=np.float64), frames.var((0, 1), dtype=np.float64)
    got = norm(torch.from_numpy(frames[0]))
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got, ((frames[0] - mean) / np.sqrt(var + 1)).clip(-5, 5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frame_shape", [(40, 50), (3, 40, 50)])
def test_pixel_norm_gives_the_same_numbers_in_both_layouts(frame_shape):
    draw = torch.Generator().manual_seed(0)
    norm = PixelNorm(frame_shape)
    norm.mean.copy_(torch.rand(frame_shape, generator=draw) * 255)
    norm.var.copy_(torch.rand(frame_shape, generator=draw) * 5000)
    obs = torch.randint(0, 256, (5, 3, 40, 50), generator=draw, dtype=torch.uint8)
    innermost = norm(obs.contiguous(memory_format=torch.channels_last))
    assert torch.equal(norm(obs), innermost) and innermost.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("network", ["atari", "lstm"])
def test_pixel_norm_has_statistics_of_each_colour(colour_env, network):
    config = Config(env=colour_env, backend="sync", network=network, num_envs=2, precision="float32", threads=1)
    spaces = probe_spaces(config)
    assert spaces.obs_shape == (3, SIZE, SIZE)
    draw = np.random.default_rng(0)
    obs = torch.from_numpy(np.stack([draw.integers(0, 2 * c, (8, 4, SIZE, SIZE), np.uint8) for c in COLOURS[:2]], 2))
    obs = torch.cat([obs, torch.full((8, 4, 1, SIZE, SIZE), 255, dtype=torch.uint8)], dim=2)  # [T, N, 3, S, S]
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces, compute)
    learner.update_normalizer(obs)
    norm, frames = learner.net.normalizer, obs.flatten(0, 1).numpy().astype(np.float64)
    if isinstance(norm, FrameNorm):
        mean, std = frames.mean((1, 2, 3)), frames.std((1, 2, 3))
        weights = norm.ALPHA ** np.arange(32)[::-1]
        expected = (frames - weights @ mean / weights.sum()) / (weights @ std / weights.sum())
    else:
        expected = ((frames - frames.mean(0)) / np.sqrt(frames.var(0) + 1)).clip(-5, 5)
    np.testing.assert_allclose(norm(obs.flatten(0, 1)), expected, rtol=1e-4, atol=1e-4)


def test_update_normalizer_counts_only_the_last_frame_of_a_stack():
    config = Config(frame_size=42, network="small", frame_stack=3, precision="float32", threads=1)  # no colours
    spaces = probe_spaces(config)
    assert spaces.obs_shape == (3, 42, 42) and spaces.stacked
    draw = torch.Generator().manual_seed(0)
    obs = torch.randint(0, 256, (2, 5, 3, 42, 42), generator=draw, dtype=torch.uint8)  # [T, N, K, S, S]
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces, compute)
    learner.update_normalizer(obs)
    newest = obs[:, :, -1].flatten(0, 1).double()
    assert int(learner.normalizer.count) == 10
    assert learner.normalizer.mean.shape == learner.normalizer.var.shape == (42, 42)
    np.testing.assert_allclose(learner.normalizer.mean, newest.mean(0), rtol=1e-5)


@pytest.mark.parametrize("network", ["small", "lstm"])
def test_train_command_resumes_and_evaluates_a_run_on_colours(colour_env, network, tmp_path):
    settings = dict(env=colour_env, backend="sync", network=network, num_envs=2, threads=1, lstm_units=8)
    settings |= dict(rollout_steps=20, total_env_steps=160, precision="float32", progress=False)
    run = tmp_path / "run"
    assert Trainer(Config(**settings, run_dir=run, stop_after=80)).run().exit_code == 0
    assert Trainer(Config(**settings, resume=run)).run().exit_code == 0
    policy = load_policy(run)
    assert policy.env_steps == 160
    norm = policy.net.normalizer
    if isinstance(norm, PixelNorm):
        np.testing.assert_allclose(norm.mean.mean((1, 2)), COLOURS, atol=1)
    else:
        mean = norm.mean / (1 - norm.ALPHA ** int(norm.count))
        assert float(mean) == pytest.approx(sum(COLOURS) / 3, abs=1)
    assert evaluate(run, 2).tolist() == [20.0, 20.0]

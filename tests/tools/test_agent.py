"""`a2c.load`: a trained policy that acts for one observation or a batch, and keeps its recurrent state."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from runs import tiny
from toys import DoublesEnv, TinyNet

import a2c
from a2c.policy import initial_state, step


@pytest.fixture(scope="module", params=["mlp", "lstm"])
def run_dir(request, tmp_path_factory):
    """A finished run of 160 decisions of CartPole."""
    run_dir = tmp_path_factory.mktemp("runs") / request.param
    assert a2c.Trainer(tiny(run_dir, network=request.param, total_env_steps=160)).run().exit_code == 0
    return run_dir


def test_agent_plays_an_environment_made_for_it(run_dir):
    agent = a2c.load(run_dir)
    env = agent.make_env(seed=3)
    obs, _ = env.reset(seed=3)
    for decisions in range(1, 501):
        action = agent.act(obs, starts=decisions == 1)
        assert isinstance(action, int) and env.action_space.contains(action)
        obs, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
    assert terminated and decisions < 200
    env.close()


class FromFive(gym.Env):
    """Asks for actions 5 and 6."""

    observation_space, action_space = gym.spaces.Box(0.0, 1.0, (2,)), gym.spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.zeros(2, np.float32), 0.0, True, False, {}


def test_agent_returns_the_actions_of_a_space_that_does_not_start_at_0(tmp_path):
    a2c.Trainer(tiny(tmp_path / "run", total_env_steps=160), env_fn=FromFive).run()
    agent = a2c.load(tmp_path / "run", env_fn=FromFive)
    assert set(agent.act(np.zeros((64, 2), np.float32))) == {5, 6}
    assert agent.act(np.zeros(2, np.float32)) in (5, 6)


class Linear(TinyNet):
    """Takes observations as they come."""

    def forward(self, obs):
        return self.policy(obs), self.value(obs)


def test_a_custom_network_of_float32_meets_no_float64_where_the_environment_returns_it(tmp_path):
    custom = {"env_fn": DoublesEnv, "network": lambda obs_shape, n_actions: Linear(*obs_shape, n_actions)}
    assert a2c.Trainer(tiny(tmp_path / "run", total_env_steps=160), **custom).run().episodes == 16  # all truncated
    agent = a2c.load(tmp_path / "run", **custom)
    obs, _ = agent.make_env().reset()
    assert obs.dtype == np.float64 and agent.act(obs) in (0, 1) and agent.act([1]) in (0, 1)


def test_agent_keeps_a_recurrent_state_per_environment_until_an_episode_starts(run_dir):
    agent, observations = a2c.load(run_dir, greedy=True), np.random.default_rng(0).normal(size=(6, 5, 4))
    state = initial_state(agent.policy.net, 5)
    for number, obs in enumerate(observations.astype(np.float32) * 10):
        starts = np.array([number == 3] * 2 + [False] * 3)
        with torch.no_grad():
            logits, _, state = step(agent.policy.net, torch.from_numpy(obs), state, torch.from_numpy(starts))
        actions = agent.act(obs, starts)
        assert actions.dtype == np.int64 and actions.tolist() == logits.argmax(dim=1).tolist()
    assert agent.act(obs[0]) == a2c.load(run_dir, greedy=True).act(obs[0], starts=True)  # another number: new episodes


def test_agent_samples_by_its_seed(run_dir):
    obs = np.zeros((200, 4), np.float32)
    first, again, other = (a2c.load(run_dir, seed=seed).act(obs) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist() and set(first.tolist()) == {0, 1}


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 4), (2, 2, 4), ()])
def test_agent_refuses_observations_of_another_shape(run_dir, shape):
    with pytest.raises(ValueError, match=r"obs must have shape \[4\], or \[N, \.\.\.\] of them, got"):
        a2c.load(run_dir).act(np.zeros(shape, np.float32))


def test_agent_refuses_what_reset_returns(run_dir):
    agent = a2c.load(run_dir)
    with pytest.raises(ValueError, match=r"obs must be an array, got a tuple: reset\(\) returns \(obs, info\)"):
        agent.act(agent.make_env().reset(seed=1))


def test_agent_does_not_repeat_its_random_actions_when_the_number_of_environments_changes(run_dir):
    agent, obs = a2c.load(run_dir), np.zeros((50, 4), np.float32)
    first = agent.act(obs)
    agent.act(obs[:1])
    assert agent.act(obs).tolist() != first.tolist()


def test_agent_takes_the_pixels_of_a_game_and_refuses_others(tmp_path):
    settings = {"env": "pong", "backend": "sync", "num_envs": 1, "network": "small", "frame_size": 42}
    run = a2c.Trainer(tiny(tmp_path / "run", **settings, rollout_steps=2, num_minibatches=1, total_env_steps=2))
    assert run.run().exit_code == 0 and run.config.env == "PongNoFrameskip-v4"  # so that `--resume` knows it
    agent = a2c.load(tmp_path / "run" / "latest.pt")
    env = agent.make_env()
    obs, _ = env.reset()
    obs.flags.writeable = False
    assert 0 <= agent.act(obs) < 6 and agent.act(np.stack([obs, obs])).shape == (2,)
    with pytest.raises(ValueError, match="obs must be pixels of dtype uint8, got float64"):
        agent.act(obs / 255)
    with pytest.raises(ValueError, match=r"starts must be one value or have shape \[1\], got \[2\]"):
        agent.act(obs, starts=np.array([True, False]))
    env.close()

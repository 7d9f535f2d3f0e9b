"""Policies with an rnn_state: carried, reset, replayed and saved at the right places."""

import copy
from contextlib import closing

import cv2
import numpy as np
import pytest
import torch
from toys import N_ACTIONS, CertainNet, CountingEnv, counting_envs, learn, vector

from a2c.cli.flags import parse_config
from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.envs.atari import CROP
from a2c.envs.single import find_spec, make_env
from a2c.networks import LstmA2C
from a2c.normalizers import FrameNorm
from a2c.policy import Policy, replay
from a2c.rollout import Rollout
from a2c.run.checkpoint import load_checkpoint
from a2c.run.trainer import Trainer
from a2c.tools.evaluate import evaluate
from a2c.transitions import unpack_batch

FLAGS = ["--preset", "cartpole-lstm", "--total-env-steps", "1000", "--no-progress"]


@pytest.fixture
def compute():
    with closing(Compute(Config(precision="float32", threads=1, backend="sync"))) as compute:
        yield compute


def lstm(units: int = 7, seed: int = 0) -> LstmA2C:
    """A small network that really uses its rnn_state: large weights, so that every step leaves a trace."""
    torch.manual_seed(seed)
    net = LstmA2C((3,), 5, units)
    with torch.no_grad():
        net.policy.weight.normal_()
    return net


def rollouts(compute, net, number, steps=6, ends="truncated"):
    """`number` rollouts of environments whose episodes last 3, 4 and 100 decisions."""
    collector = Collector([counting_envs(3, 4, 100, ends=ends, dtype=np.float32)], net, steps, compute)
    return [copy.deepcopy(collector.collect().rollout) for _ in range(number)]


def again(net, rollout):
    return replay(net, rollout.obs, rollout.starts, rollout.rnn_state)


def test_replay_equals_the_steps_that_were_taken(compute):
    net = lstm()
    for rollout in rollouts(compute, net, 3):
        logits, values = again(net, rollout)
        log_probs = logits.log_softmax(2).gather(2, rollout.actions[:, :, None]).squeeze(2)
        torch.testing.assert_close(values, rollout.values)
        torch.testing.assert_close(log_probs, rollout.log_probs)


def test_replay_differs_without_rnn_state_or_with_one_that_is_never_reset(compute):
    # Otherwise the test above could not fail.
    net, rollout = lstm(), rollouts(compute, lstm(), 2)[1]
    values = again(net, rollout)[1]
    assert not torch.allclose(values, replay(net, rollout.obs, rollout.starts, 0 * rollout.rnn_state)[1], atol=1e-3)
    assert not torch.allclose(values, replay(net, rollout.obs, 0 * rollout.starts > 0, rollout.rnn_state)[1], atol=1e-3)


def test_rnn_state_depends_on_the_running_episode_alone(compute):
    net, (first, second) = lstm(), rollouts(compute, lstm(), 2)
    obs, starts = torch.cat([first.obs, second.obs]), torch.cat([first.starts, second.starts])
    values = torch.cat([first.values, second.values])
    for n in range(3):
        for t in range(len(obs)):
            begin = max(s for s in range(t + 1) if starts[s, n])
            rnn_state = torch.zeros(1, net.rnn_state_size)
            for s in range(begin, t + 1):
                _, value, rnn_state = net.step(obs[s, n][None], rnn_state)
            torch.testing.assert_close(value.squeeze(), values[t, n])


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_returns_bootstrap_with_the_rnn_state_after_the_rollout(compute, ends):
    net = lstm()
    first, second = rollouts(compute, net, 2, ends=ends)
    first.rewards.zero_()
    next_values = unpack_batch(first, net, gamma=1.0, gae_lambda=0.0)[2].unflatten(0, (6, 3))
    torch.testing.assert_close(next_values[-1, 2], second.values[0, 2])  # its episode continues
    for (t, n), obs in zip(first.final_index.tolist(), first.final_obs, strict=True):
        begin = max(s for s in range(t + 1) if first.starts[s, n])
        rnn_state = torch.zeros(1, net.rnn_state_size)
        for seen in (*first.obs[begin : t + 1, n], obs):
            _, value, rnn_state = net.step(seen[None], rnn_state)
        torch.testing.assert_close(next_values[t, n], value.squeeze())
    assert len(first.final_index) == (3 if ends == "truncated" else 0)
    for mine, parts in zip(first.split(3), next_values.split(1, dim=1), strict=True):
        torch.testing.assert_close(unpack_batch(mine, net, gamma=1.0, gae_lambda=0.0)[2], parts.flatten())


def test_replay_gradient_goes_back_to_the_start_of_the_episode(compute):
    net, rollout = lstm(), rollouts(compute, lstm(), 2)[1]
    assert not rollout.rnn_state.requires_grad  # nothing reaches the rollout before
    obs = rollout.obs.clone().requires_grad_()
    values = replay(net, obs, rollout.starts, rollout.rnn_state)[1]
    for n in range(3):
        (gradient,) = torch.autograd.grad(values[-1, n].sum(), obs, retain_graph=True)
        begin = max((s for s in range(6) if rollout.starts[s, n]), default=0)
        reached = gradient[:, n].abs().sum(1) > 0
        assert reached.tolist() == [t >= begin for t in range(6)]
        assert gradient.sum() != 0 and gradient[:, [m for m in range(3) if m != n]].abs().sum() == 0


def test_split_and_join_keep_each_rnn_state_with_its_environment(compute):
    rollout = rollouts(compute, lstm(), 2)[1]
    parts = rollout.split(3)
    assert [part.rnn_state.shape for part in parts] == [(1, 14)] * 3
    joined = Rollout.join(parts)
    for name, value in vars(joined).items():
        if name not in ("final_index", "final_obs", "final_rnn_state"):
            assert torch.equal(value, getattr(rollout, name)), name
    finals = {tuple(i): o.tolist() for i, o in zip(rollout.final_index.tolist(), rollout.final_obs, strict=True)}
    assert {tuple(i): o.tolist() for i, o in zip(joined.final_index.tolist(), joined.final_obs, strict=True)} == finals


def test_compute_gradients_of_shards_equal_those_of_the_whole_batch(compute, monkeypatch):
    rollout = rollouts(compute, lstm(), 2)[1]
    config = Config(precision="float32", threads=1, max_grad_norm=0.0)
    gradients = []
    for parts in (1, 3):
        net = lstm()
        monkeypatch.setattr(compute, "shards", lambda size, parts=parts: parts)
        learn(net, net, torch.optim.SGD(net.parameters(), lr=0.0), rollout, config, compute)
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


class RecallEnv(CountingEnv):
    """Shows a number once, at the start, and pays at the fourth decision for repeating it as an action."""

    def __init__(self, index: int) -> None:
        super().__init__(index, 4, "terminated", np.float32)

    def _obs(self) -> np.ndarray:
        if self.step_count == 0:
            self.wanted = int(self.np_random.integers(2))
        shown = [self.wanted, 1 - self.wanted] if self.step_count == 0 else [0, 0]
        return np.array([*shown, self.step_count / 4], np.float32)

    def step(self, action):
        wanted = self.wanted
        obs, _, *rest = super().step(action)
        return obs, float(rest[0] and action == wanted), *rest


@pytest.mark.parametrize("rnn_state", [True, False])
def test_learner_solves_a_memory_task_with_rnn_state_and_not_without(compute, rnn_state):
    torch.manual_seed(0)
    net = LstmA2C((3,), 2, 8)
    if not rnn_state:
        net.rnn_state_size = 0  # the same network without an rnn_state
    config = Config(
        precision="float32", threads=1, gamma=1.0, rollout_steps=8, learning_rate=0.02, adam_eps=1e-5, entropy_coef=0.0
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    collector = Collector([vector(*(RecallEnv(i) for i in range(16)))], net, 8, compute)
    if not rnn_state:
        net.forward = lambda obs: net.step(obs, torch.zeros(len(obs), 16))[:2]
    scores = []
    for _ in range(200):
        rollout = collector.collect().rollout
        scores.append(float(rollout.rewards.sum()) / 32)  # 32 episodes end in a rollout
        learn(net, net, optimizer, rollout, config, compute)
    mean = sum(scores[-20:]) / 20
    assert mean > 0.9 if rnn_state else mean < 0.65


def test_a_greedy_policy_takes_the_larger_of_two_logits_however_close():
    logits = torch.tensor([[0.0, 1e-9], [1e-9, 0.0]])
    policy = Policy(lambda obs: (logits, obs), 2, "cpu", greedy=True)
    assert torch.equal(*logits.log_softmax(1).unbind(1))  # rounded, both actions are as likely
    assert policy.act(torch.zeros(2, 1), torch.ones(2, dtype=torch.bool)).actions.tolist() == [1, 0]


def test_frame_norm_equals_the_formula_frame_by_frame():
    frames = torch.randint(0, 256, (9, 5, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    norm, mean, std = FrameNorm(), 0.0, 0.0
    for frame in frames.numpy().astype(np.float64):
        mean, std = 0.9999 * mean + 0.0001 * frame.mean(), 0.9999 * std + 0.0001 * frame.std()
    norm.update(frames[:1])
    first = frames[0].float()
    torch.testing.assert_close(norm(frames[0]), (first - first.mean()) / first.std(correction=0), rtol=1e-4, atol=1e-4)
    norm.update(frames[1:5])
    norm.update(frames[5:])
    bias = 1 - 0.9999**9
    expected = (frames[3].numpy() - mean / bias) / (std / bias)
    np.testing.assert_allclose(norm(frames[3]).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_frame_norm_divides_by_255_before_its_first_frame():
    assert torch.equal(FrameNorm()(torch.tensor([[0, 255]], dtype=torch.uint8)), torch.tensor([[0.0, 1.0]]))


def test_lstm_preset_sees_the_field_alone_in_42_by_42():
    config = Config.from_preset("lstm")
    env = make_env(config, find_spec(config.env), 0)
    obs, _ = env.reset(seed=0)
    assert obs.shape == env.observation_space.shape == (1, 42, 42)
    for _ in range(30):
        obs, *_ = env.step(2)
    screen = np.maximum(env.pooled, env.screen)[CROP]  # pooled already holds the maximum
    assert screen.shape == (160, 160)
    assert np.array_equal(obs[0], cv2.resize(screen, (42, 42), interpolation=cv2.INTER_AREA))
    assert len(np.unique(obs)) > 3


def test_lstm_preset_has_the_documented_network():
    net = LstmA2C((1, 42, 42), 6)
    shapes = [tuple(p.shape) for name, p in net.named_parameters() if "conv" in name and "weight" in name]
    assert shapes == [(32, 1, 3, 3), (32, 32, 3, 3), (32, 32, 3, 3), (32, 32, 3, 3)]
    assert net.lstm.input_size == 288 and net.lstm.hidden_size == 256  # 42 -> 21 -> 11 -> 6 -> 3


def test_evaluate_carries_the_rnn_state(tmp_path, monkeypatch):
    assert Trainer(parse_config([*FLAGS, "--run-dir", str(tmp_path / "run")])).run().exit_code == 0
    seen, act = [], LstmA2C.step

    def step(net, obs, rnn_state):
        seen.append((rnn_state == 0).all(dim=1))
        return act(net, obs, rnn_state)

    monkeypatch.setattr(LstmA2C, "step", step)
    scores = evaluate(tmp_path / "run", 3)
    # The rows start together; until the first episode ends no rnn_state is zero again.
    assert seen[0].all() and not any(row.any() for row in seen[1 : int(min(scores))])
    assert min(scores) < max(scores) and seen[int(min(scores))].any()


def test_checkpoint_holds_the_rnn_state(tmp_path):
    assert Trainer(parse_config([*FLAGS, "--run-dir", str(tmp_path / "run")])).run().exit_code == 0
    policies = load_checkpoint(tmp_path / "run" / "latest.pt")["algorithm"]["policies"]
    rnn_state = torch.cat([policy["rnn_state"] for policy in policies])
    assert rnn_state.shape == (16, 32) and rnn_state.abs().sum() > 0


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


def test_perturb_adds_noise_of_its_own_to_each_environment_until_the_next_call():
    starts, logits = torch.zeros(4000, dtype=torch.bool), torch.tensor([2.0, -1.0, 0.5]).expand(4000, 3)
    policy = Policy(lambda obs: (logits, obs), 4000, "cpu")

    def perturbed(scale):
        """Noise of the first decision, which later ones have, too."""
        policy.perturb(scale)
        decisions = [policy.act(torch.zeros(4000, 1), starts)]
        noise = torch.zeros(4000, 3) if policy.noise is None else policy.noise.clone()
        decisions += [policy.act(torch.zeros(4000, 1), starts) for _ in range(3)]
        for actions, log_probs, _ in decisions:
            expected = (logits + noise).log_softmax(1).gather(1, actions[:, None]).squeeze(1)
            torch.testing.assert_close(log_probs, expected)
        return noise

    noises = [perturbed(0.5), perturbed(0.5)]
    for noise in noises:
        assert noise.std().item() == pytest.approx(0.5, rel=0.03) and abs(noise.mean().item()) < 0.02
    together = torch.cat(noises, dim=1)  # over environments, the six columns have nothing to do with each other
    assert (torch.corrcoef(together.T) - torch.eye(6)).abs().max() < 0.08
    assert not perturbed(0.0).any()


@pytest.mark.parametrize("size", [(1, 2), (7, 6), (50, 18)])
def test_act_draws_what_torch_multinomial_draws_bit_for_bit(size):
    draw = torch.Generator().manual_seed(5)
    policy, theirs = Policy(lambda obs: (obs, obs[:, :1]), size[0], "cpu", 3), torch.Generator().manual_seed(3)
    for _ in range(50):
        logits = 3 * torch.randn(size, generator=draw)
        logits[:, 1:][torch.rand(size[0], size[1] - 1, generator=draw) < 0.2] = -torch.inf  # masked actions
        expected = torch.multinomial(logits.log_softmax(1).exp(), 1, generator=theirs).squeeze(1)
        assert torch.equal(policy.act(logits, torch.zeros(size[0], dtype=torch.bool)).actions, expected)
    assert torch.equal(policy.generator.get_state(), theirs.get_state())


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("bad", [[torch.nan, 0.0], [torch.inf, 0.0], [0.0, torch.nan], [-torch.inf, -torch.inf]])
def test_a_bad_logit_of_one_environment_is_an_error(bad, greedy):
    logits, starts = torch.tensor([[0.0, 1.0], bad]), torch.zeros(2, dtype=torch.bool)
    policy = Policy(lambda obs: (logits, obs), 2, "cpu", greedy=greedy)
    with pytest.raises(FloatingPointError, match="the policy's logits are NaN or infinite: an observation or a param"):
        policy.act(torch.zeros(2, 1), starts)
    assert policy.decide(torch.zeros(2, 1), starts).actions.min() >= 0  # an action, whatever it is worth


def test_collect_raises_where_one_decision_of_a_rollout_had_a_bad_logit(compute):
    class Net(CertainNet):
        def forward(self, obs):
            logits, values = super().forward(obs)
            return torch.where((obs[:, :1] == 1) & (obs[:, 2:] == 3), torch.nan, logits), values

    collector = Collector([counting_envs(3, 5)], Net(), 3, compute)
    collector.collect()
    with pytest.raises(FloatingPointError, match="the policy's logits are NaN or infinite"):
        collector.collect()

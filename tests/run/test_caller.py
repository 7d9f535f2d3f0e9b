"""Training from a program: step by step, with a network and an environment of one's own."""

import errno
import signal
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from runs import tiny
from torch import nn
from torch.nn.utils import prune

import a2c
from a2c.algorithms.base import TrainingStats, merge_stats
from a2c.cli import commands as cli
from a2c.config.config import Config
from a2c.envs.single import probe_spaces, register_env
from a2c.envs.vector_env import Episode
from a2c.processes.errors import WorkerError
from a2c.run.checkpoint import CheckpointError, load_checkpoint


class TwoLayers(nn.Module):
    def __init__(self, input_shape, n_actions):
        super().__init__()
        self.normalizer = "a name that means something else here"
        self.body = nn.Sequential(nn.Linear(*input_shape, 8), nn.Tanh())
        self.policy, self.value = nn.Linear(8, n_actions), nn.Linear(8, 1)

    def forward(self, obs):
        hidden = self.body(obs)
        return self.policy(hidden), self.value(hidden)


class Recurrent(nn.Module):
    rnn_state_size = 8

    def __init__(self, input_shape, n_actions):
        super().__init__()
        self.cell, self.policy, self.value = nn.GRUCell(*input_shape, 8), nn.Linear(8, n_actions), nn.Linear(8, 1)

    def forward(self, obs):
        return self.step(obs, torch.zeros(len(obs), 8))[:2]

    def step(self, obs, rnn_state):
        rnn_state = self.cell(obs, rnn_state)
        return self.policy(rnn_state), self.value(rnn_state), rnn_state

    def replay(self, obs, starts, rnn_state):
        logits, values = [], []
        for step_obs, start in zip(obs, starts, strict=True):
            step_logits, step_values, rnn_state = self.step(step_obs, rnn_state * ~start[:, None])
            logits.append(step_logits)
            values.append(step_values)
        return torch.cat(logits), torch.cat(values)


class Shared(nn.Module):
    """Two heads that hold the same layers: its state names them twice."""

    def __init__(self, input_shape, n_actions):
        super().__init__()
        body = nn.Sequential(nn.Linear(*input_shape, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.policy, self.value = (nn.Sequential(body, nn.Linear(128, outputs)) for outputs in (n_actions, 1))

    def forward(self, obs):
        return self.policy(obs), self.value(obs)


class Lazy(TwoLayers):
    def __init__(self, input_shape, n_actions):
        super().__init__(input_shape, n_actions)
        self.body = nn.Sequential(nn.LazyLinear(8), nn.Tanh())


class Frozen(TwoLayers):
    """A body that was trained before, and a layer that nothing uses."""

    def __init__(self, input_shape, n_actions):
        super().__init__(input_shape, n_actions)
        self.body.requires_grad_(False)
        self.spare = nn.Linear(2, 3)

    def forward(self, obs):
        return super().forward(obs.to(self.policy.weight.dtype))


class Plane(gym.Env):
    """Pays 1 for action 1, for ten steps."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(3, dtype=np.float32), {}

    def step(self, action):
        self.steps += 1
        return self.np_random.random(3, dtype=np.float32), float(action), self.steps == 10, False, {}


def network_of(run_dir):
    return load_checkpoint(run_dir / "latest.pt")["network"]


def same(first, second):
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_iterating_trains_as_run_does_and_says_where_it_is(tmp_path):
    trainer = a2c.Trainer(tiny(tmp_path / "steps"))
    seen = list(trainer)
    a2c.Trainer(tiny(tmp_path / "run")).run()
    assert same(network_of(tmp_path / "steps"), network_of(tmp_path / "run"))
    assert [progress.env_steps for progress in seen] == [80, 160, 240, 320, 400, 480]
    assert [progress.updates for progress in seen] == [4, 8, 12, 16, 20, 24]
    episodes = [episode.score for progress in seen for episode in progress.episodes]
    assert len(episodes) == trainer.result().episodes and seen[-1].score == pytest.approx(np.mean(episodes))


def test_the_caller_sees_every_episode_of_workers_too(tmp_path):
    trainer = a2c.Trainer(tiny(tmp_path / "run", algorithm="a3c", workers=2))
    last = TrainingStats(0, [Episode(0, 7.0, 7)], {})
    drain = trainer.algorithm.drain
    trainer.algorithm.drain = lambda: merge_stats([drain(), last], 1)  # as where one ends at the very end
    seen = [episode for progress in trainer for episode in progress.episodes]
    assert len(seen) == trainer.result().episodes and seen[-1].score == 7.0


def test_leaving_the_loop_saves_and_the_run_continues_exactly(tmp_path):
    trainer = a2c.Trainer(tiny(tmp_path / "left"))
    for progress in trainer:
        if progress.env_steps == 160:
            break
    result = trainer.result()
    assert (result.env_steps, result.finished, result.exit_code) == (160, False, 0)
    assert result.reason == "stopped by the caller"
    assert load_checkpoint(tmp_path / "left" / "latest.pt")["env_steps"] == 160
    result = a2c.Trainer.resume(tmp_path / "left").run()
    a2c.Trainer(tiny(tmp_path / "straight")).run()
    assert result.finished and same(network_of(tmp_path / "left"), network_of(tmp_path / "straight"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python prints the error
def test_an_error_of_the_last_checkpoint_after_a_break_is_raised_by_result(tmp_path, monkeypatch):
    trainer = a2c.Trainer(tiny(tmp_path / "run"))

    def refuse(outputs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer.state, "save_last", refuse)
    for _ in trainer:
        break
    with pytest.raises(OSError, match="No space left on device"):
        trainer.result()


def test_an_error_in_the_loop_is_the_callers_and_the_run_is_saved(tmp_path):
    def train():
        for _ in a2c.Trainer(tiny(tmp_path / "run")):
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        train()
    assert a2c.Trainer.resume(tmp_path / "run").run().finished  # and its lock is free


def test_signals_between_two_steps_are_the_callers(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        for _ in a2c.Trainer(tiny(tmp_path / "run")):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_result_says_how_the_run_has_ended(tmp_path):
    result = a2c.Trainer(tiny(tmp_path / "run")).run()
    scores = [float(line.split(",")[2]) for line in (tmp_path / "run" / "episodes.csv").read_text().splitlines()[1:]]
    assert result.finished and result.reason == "all environment steps done" and result.exit_code == 0
    assert result.episodes == len(scores) and result.score == pytest.approx(np.mean(scores[-100:]))
    assert result.best_score == -np.inf and result.env_steps == 480 and result.seconds > 0
    assert f"score: {result.score:.1f} (mean of the last {min(100, len(scores))} of {len(scores)} episodes)" in repr(
        result
    )
    assert str(tmp_path / "run") in repr(result)


def test_result_of_a_finished_run_that_is_resumed(tmp_path):
    first = a2c.Trainer(tiny(tmp_path / "run")).run()
    again = a2c.Trainer.resume(tmp_path / "run").run()
    assert again.finished and (again.env_steps, again.score) == (first.env_steps, first.score)
    assert 0 < again.seconds <= first.seconds


@pytest.mark.parametrize("network", [TwoLayers, Recurrent, Shared])
@pytest.mark.parametrize("algorithm", ["a2c", "ga3c"])
def test_own_network_learns_resumes_and_plays(tmp_path, network, algorithm):
    changes = {"algorithm": algorithm, "workers": 1 if algorithm == "ga3c" else 0}
    config = tiny(tmp_path / "run", stop_after=160, **changes)
    trainer = a2c.Trainer(config, network=network)
    before = {name: value.clone() for name, value in trainer.learner.net.state_dict().items()}
    assert not trainer.run().finished
    after = network_of(tmp_path / "run")
    assert list(before) == list(after) and not any(torch.equal(before[name], after[name]) for name in before)
    assert a2c.Trainer.resume(tmp_path / "run", network=network).run().finished
    agent = a2c.load(tmp_path / "run", network=network)
    obs, _ = agent.make_env().reset(seed=0)
    assert type(agent.policy.net) is network and not agent.policy.net.training and agent.act(obs) in (0, 1)
    assert a2c.evaluate(tmp_path / "run", 2, network=network).shape == (2,)


@pytest.mark.parametrize(
    "changes",
    [{}, {"precision": "bfloat16"}, {"optimizer": "rmsprop", "rmsprop_eps_inside": True}, {"algorithm": "ga3c"}],
)
def test_own_network_keeps_what_is_frozen_or_unused_and_learns_the_rest(tmp_path, changes):
    trainer = a2c.Trainer(tiny(tmp_path / "run", stop_after=160, **changes), network=Frozen)
    before = {name: value.clone() for name, value in trainer.learner.net.state_dict().items()}
    trainer.run()
    assert a2c.Trainer.resume(tmp_path / "run", network=Frozen).run().finished
    after = network_of(tmp_path / "run")
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {name for name in before if name.startswith(("body", "spare"))}


@pytest.mark.parametrize(("network", "number"), [(TwoLayers, 40), (Recurrent, 4)])
def test_introduction_says_how_many_minibatches_an_own_network_learns(tmp_path, network, number):
    trainer = a2c.Trainer(tiny(tmp_path / "run", num_minibatches=40, total_env_steps=80), network=network)
    assert f"4 sync environments x 20 steps, {number} minibatches, 1 epoch" in "\n".join(trainer.introduction())
    trainer.run()
    assert trainer.learner.updates == number  # of one rollout: 4 environments have 4 whole windows


def test_own_recurrent_network_cannot_learn_from_sliding_windows(tmp_path):
    settings = {"sliding_batch": 8, "num_minibatches": 1, "gae_lambda": 1.0}
    with pytest.raises(ValueError, match="must not be recurrent when sliding_batch is set, got custom"):
        a2c.Trainer(tiny(tmp_path / "run", **settings), network=Recurrent)
    assert not (tmp_path / "run").exists()
    a2c.Trainer(tiny(tmp_path / "run", **settings), network=TwoLayers).close()


def test_own_network_continues_bit_for_bit(tmp_path, monkeypatch):
    a2c.Trainer(tiny(tmp_path / "run", stop_after=240), network=TwoLayers).run()
    monkeypatch.setenv("HOME", str(tmp_path))
    a2c.Trainer.resume("~/run", network=TwoLayers).run()
    a2c.Trainer(tiny(tmp_path / "straight"), network=TwoLayers).run()
    assert same(network_of(tmp_path / "run"), network_of(tmp_path / "straight"))


def test_own_network_must_be_given_again(tmp_path, capsys):
    a2c.Trainer(tiny(tmp_path / "run", stop_after=80), network=TwoLayers).run()
    for use in (a2c.Trainer.resume, a2c.load):
        with pytest.raises(ValueError, match="network custom must be given in Python, as the argument network"):
            use(tmp_path / "run")
    with pytest.raises(CheckpointError, match="belongs to another network"):
        a2c.load(tmp_path / "run", network=Recurrent)
    with pytest.raises(CheckpointError, match="needs the network of its run: KeyError: 'mine'"):
        a2c.load(tmp_path / "run", network=lambda input_shape, n_actions: {}["mine"])
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 2
    assert "damaged" not in capsys.readouterr().err
    assert cli.main(["train", "--network", "custom", "--env", "CartPole-v1", "--backend", "sync"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_no_network_is_given_for_one_of_a2cs(tmp_path):
    a2c.Trainer(tiny(tmp_path / "run", stop_after=80)).run()
    with pytest.raises(CheckpointError, match="it is the built-in network mlp: leave out the argument network"):
        a2c.load(tmp_path / "run", network=TwoLayers)


def test_own_network_with_lazy_layers_starts_from_the_seed_and_continues(tmp_path):
    before = torch.random.get_rng_state()
    first, second = (a2c.Trainer(tiny(tmp_path / name, stop_after=80), network=Lazy) for name in "ab")
    assert same(first.learner.net.state_dict(), second.learner.net.state_dict())
    first.run()
    assert a2c.Trainer.resume(tmp_path / "a", network=Lazy).run().finished
    a2c.load(tmp_path / "a", network=Lazy)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_own_network_that_is_recurrent_is_checked_before_anything_starts(tmp_path):
    class NoStep(TwoLayers):
        rnn_state_size = 8

    class WrongReplay(Recurrent):
        def replay(self, obs, starts, rnn_state):
            return super().replay(obs, starts, rnn_state)[0][:, :1], obs

    for network, what in ((NoStep, "AttributeError"), (WrongReplay, r"got|Error")):
        with pytest.raises(ValueError, match=f"network with rnn_state_size H must have step.*{what}"):
            a2c.Trainer(tiny(tmp_path / "run"), network=network)
    with pytest.raises(ValueError, match=r"network must make a torch.nn.Module, got function"):
        a2c.Trainer(tiny(tmp_path / "run"), network=lambda input_shape, n_actions: lambda obs: obs)
    assert not (tmp_path / "run").exists()


def test_own_network_keeps_what_it_learns_in_float32_whatever_its_layers_are_called(tmp_path):
    class Normalized(TwoLayers):
        def __init__(self, input_shape, n_actions):
            super().__init__(input_shape, n_actions)
            self.normalizer = nn.LayerNorm(input_shape)

        def forward(self, obs):
            return super().forward(self.normalizer(obs.to(self.normalizer.weight.dtype)))

    trainer = a2c.Trainer(tiny(tmp_path / "run", precision="bfloat16", stop_after=80), network=Normalized)
    assert trainer.run().env_steps == 80
    assert {parameter.dtype for parameter in trainer.learner.net.parameters()} == {torch.float32}
    assert trainer.learner.replica.normalizer.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("own", [{"network": TwoLayers}, {"env_fn": lambda: Plane()}])
def test_what_another_process_cannot_make_is_not_evaluated_there(tmp_path, own):
    with pytest.raises(ValueError, match=r"eval_every must be 0 with a network or env_fn, .* got 80"):
        a2c.Trainer(tiny(tmp_path / "run", eval_every=80), **own)


def test_own_network_of_a3c_must_be_importable(tmp_path):
    class Local(TwoLayers):
        pass

    with pytest.raises(ValueError, match="network must be a class that a3c workers can import from a module"):
        a2c.Trainer(tiny(tmp_path / "run", algorithm="a3c"), network=Local)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda obs: obs, "must map obs .B, 4. of torch.float32 to .logits .B, A., values"),
        (lambda obs: (obs[:, :3], obs[:, :1]), r"got \[\[2, 3\], \[2, 1\]\] for B = 2 and A = 2"),
        (lambda obs: (obs[:, :2], obs[:, 0]), r"got \[\[2, 2\], \[2\]\]"),
        (lambda obs: obs @ torch.zeros(5, 2), "RuntimeError"),
    ],
)
def test_own_network_is_checked_before_anything_starts(tmp_path, answer, message):
    class Wrong(TwoLayers):
        def forward(self, obs):
            return answer(obs)

    with pytest.raises(ValueError, match=message):
        a2c.Trainer(tiny(tmp_path / "run"), network=Wrong)
    assert not (tmp_path / "run").exists()


def test_own_network_that_is_given_other_numbers_than_its_own_is_refused_in_bfloat16(tmp_path):
    class Float32(TwoLayers):
        def forward(self, obs):
            return super().forward(obs.float())

    class Float32State(Recurrent):
        def step(self, obs, rnn_state):
            logits, values, rnn_state = super().step(obs, rnn_state.float())
            return logits, values, rnn_state

        def forward(self, obs):
            return torch.zeros(len(obs), 2), torch.zeros(len(obs), 1)

    with pytest.raises(ValueError, match=r"network in bfloat16 must map obs .B, 4. .*same dtype"):
        a2c.Trainer(tiny(tmp_path / "run", precision="bfloat16"), network=Float32)
    with pytest.raises(ValueError, match=r"network in bfloat16 with rnn_state_size H must have step .*dtype"):
        a2c.Trainer(tiny(tmp_path / "run", precision="bfloat16"), network=Float32State)
    assert not (tmp_path / "run").exists()
    a2c.Trainer(tiny(tmp_path / "run"), network=Float32).close()


class Storing(TwoLayers):
    """Stores a tensor in each call, where `store` says."""

    def forward(self, obs):
        hidden = self.body(obs)
        self.store(hidden)
        return self.policy(hidden), self.value(hidden)

    def store(self, hidden):
        self.body.features = hidden


class InTuple(Storing):
    def store(self, hidden):
        self.hidden = (hidden, hidden)


class InBuffer(Storing):
    def __init__(self, input_shape, n_actions):
        super().__init__(input_shape, n_actions)
        self.register_buffer("hidden", torch.zeros(1, 8))

    def store(self, hidden):
        self.hidden = hidden.detach()


class OfOneSize(Storing):
    mask = None

    def store(self, hidden):
        if self.mask is None or len(self.mask) != len(hidden):
            self.mask = torch.ones(len(hidden), 1)


@pytest.mark.parametrize(
    ("network", "name"),
    [(Storing, "body.features"), (InTuple, "hidden.0"), (InBuffer, "hidden"), (OfOneSize, "mask")],
)
def test_own_network_of_several_threads_must_not_store_tensors_of_a_call_on_itself(tmp_path, network, name):
    with pytest.raises(ValueError, match=f"must not store a tensor on itself in a call, as it does in {name}: several"):
        a2c.Trainer(tiny(tmp_path / "run", threads=2), network=network)
    assert not (tmp_path / "run").exists()
    a2c.Trainer(tiny(tmp_path / "run", threads=1, stop_after=80), network=network).run()


def test_own_network_of_several_threads_may_store_constants_and_keeps_its_buffers(tmp_path):
    class Constant(TwoLayers):
        scale = None

        def __init__(self, input_shape, n_actions):
            super().__init__(input_shape, n_actions)
            self.body.append(nn.BatchNorm1d(8))

        def forward(self, obs):
            if self.scale is None:
                self.scale = torch.ones(())
            return super().forward(obs * self.scale)

    one, two = (a2c.Trainer(tiny(tmp_path / "run", threads=threads), network=Constant) for threads in (1, 2))
    assert same(one.learner.net.state_dict(), two.learner.net.state_dict())
    one.close()
    two.close()


@pytest.mark.parametrize("network", [TwoLayers, Storing])
def test_a_network_in_training_can_be_evaluated_and_goes_on_unchanged(tmp_path, network):
    net, config = network((4,), 2), tiny(tmp_path / "run", checkpoint_every=80, threads=1)
    for progress in a2c.Trainer(config, network=lambda input_shape, n_actions: net):
        if progress.env_steps == 160:
            now = {name: value.clone() for name, value in net.state_dict().items()}
            a2c.evaluate(tmp_path / "run", 1, network=lambda input_shape, n_actions: net)  # of an older checkpoint
            assert same(now, net.state_dict()) and net.training


def pruned(input_shape, n_actions):
    net = TwoLayers(input_shape, n_actions)
    prune.random_unstructured(net.body[0], "weight", 0.5)
    return net


def closing_over_layers(input_shape, n_actions):
    net = TwoLayers(input_shape, n_actions)
    net.forward = lambda obs: (net.policy(net.body(obs)), net.value(net.body(obs)))
    return net


@pytest.mark.parametrize("network", [pruned, closing_over_layers])
def test_own_network_that_cannot_be_copied_is_resumed_and_played(tmp_path, network):
    a2c.Trainer(tiny(tmp_path / "run", threads=1, stop_after=160), network=network).run()
    a2c.Trainer.resume(tmp_path / "run", network=network).run()
    agent = a2c.load(tmp_path / "run", checkpoint="latest.pt", network=network)
    net, obs = network((4,), 2), torch.ones(1, 4)
    net.load_state_dict(network_of(tmp_path / "run"))
    assert torch.equal(agent.policy.net(obs)[0], net(obs)[0])


def test_own_network_must_be_a_function_and_have_something_to_learn(tmp_path):
    def frozen(input_shape, n_actions):
        return TwoLayers(input_shape, n_actions).requires_grad_(False)

    with pytest.raises(ValueError, match="network must have parameters that can be learned, got none with requires_g"):
        a2c.Trainer(tiny(tmp_path / "run"), network=frozen)
    with pytest.raises(ValueError, match="network must be a class or function that makes a network, got a network"):
        a2c.Trainer(tiny(tmp_path / "run"), network=TwoLayers((4,), 2))
    assert not (tmp_path / "run").exists()


def test_an_environment_in_place_of_env_fn_is_refused(tmp_path):
    with pytest.raises(ValueError, match="env_fn must be a function that makes an environment, got <"):
        a2c.Trainer(tiny(tmp_path / "run"), env_fn=gym.make("CartPole-v1"))


def test_an_env_fn_that_cannot_be_called_without_arguments_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"env_fn must make an environment, got TypeError: .*'size'"):
        a2c.Trainer(tiny(tmp_path / "run"), env_fn=lambda size: Plane())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("env_fn", [Plane, lambda: Plane(), partial(Plane)])
def test_own_environment_needs_no_id(tmp_path, backend, env_fn):
    config = tiny(tmp_path / "run", backend=backend, num_envs=2, total_env_steps=1200, stop_after=400, gamma=0.5)
    first = a2c.Trainer(config, env_fn=env_fn).run()
    last = a2c.Trainer.resume(tmp_path / "run", env_fn=env_fn).run()
    assert first.episodes == 40 and last.finished and last.score > first.score
    scores = a2c.evaluate(tmp_path / "run", 4, env_fn=env_fn)
    assert scores.shape == (4,) and scores.max() <= 10
    agent = a2c.load(tmp_path / "run", env_fn=env_fn)
    assert agent.make_env().reset(seed=1)[0].shape == (3,)


def test_own_environment_may_come_from_a_function_of_another_name(tmp_path):
    def plane_again():
        return Plane()

    a2c.Trainer(tiny(tmp_path / "run", stop_after=80), env_fn=Plane).run()
    assert a2c.Trainer.resume(tmp_path / "run", stop_after=0, env_fn=plane_again).run().exit_code == 0


class Grey(Plane):
    """A grey picture, as gymnasium's GrayscaleObservation makes it."""

    observation_space = gym.spaces.Box(0, 255, (40, 44), np.uint8)


def test_grey_pictures_without_channels_get_one():
    spaces = probe_spaces(Config(env=register_env(Grey), backend="sync"))
    assert spaces.obs_shape == (1, 40, 44) and spaces.obs_dtype == np.uint8


def paying(score):
    """An `env_fn` that has the same name for every score."""
    return lambda: gym.wrappers.TransformReward(Plane(), lambda reward: score)


def test_own_environments_of_one_name_are_not_mixed_up(tmp_path):
    config = {"total_env_steps": 160, "num_envs": 2}
    trainers = [a2c.Trainer(tiny(tmp_path / str(n), **config), env_fn=paying(n)) for n in (1.0, 2.0)]
    assert [trainer.run().score for trainer in trainers] == [10.0, 20.0]
    agents = [a2c.load(tmp_path / str(n), env_fn=paying(n)) for n in (1.0, 2.0)]
    for agent, reward in zip(agents, (1.0, 2.0), strict=True):
        env = agent.make_env()
        env.reset(seed=0)
        assert env.step(0)[1] == reward


def test_a_restart_begins_with_the_environment_of_its_own_run(tmp_path):
    first = a2c.Trainer(tiny(tmp_path / "1", total_env_steps=320, num_envs=2), env_fn=paying(1.0))
    training_step, failures = first.algorithm.training_step, [WorkerError("died")]

    def fail_once():
        if failures:
            raise failures.pop()
        return training_step()

    first.algorithm.training_step = fail_once
    second = a2c.Trainer(tiny(tmp_path / "2", total_env_steps=160, num_envs=2), env_fn=paying(2.0))
    first.start = partial(lambda start: (start(), second.start()), first.start)
    assert first.run().score == 10.0 and not failures
    second.close()


def test_own_environment_must_be_given_again_in_another_process(tmp_path, capsys):
    a2c.Trainer(tiny(tmp_path / "run", stop_after=80), env_fn=Plane).run()
    gym.registry.pop("custom/Plane-v0")
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 2
    assert "env must be a registered Gymnasium id, got 'custom/Plane-v0'" in capsys.readouterr().err


def test_help_explains_every_field_of_config():
    text = a2c.Config.__doc__
    for name, meaning in {"gamma": "Discount factor (0 to 1).", "seed": "Seed of environments"}.items():
        assert f"\n    {name}: {meaning}" in text

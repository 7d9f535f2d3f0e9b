"""GA3C: the predictor gives the outputs of the network, rollouts are whole, and the policy lag is measured."""

import copy
import math
import statistics
import threading
import time
from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe

import pytest
import torch

from a2c.algorithms import predictor as predictor_module
from a2c.algorithms.ga3c import GA3C
from a2c.algorithms.predictor import Predictor, RemoteNetwork, make_buffers
from a2c.algorithms.worker_tasks import make_tasks
from a2c.cli.commands import train
from a2c.cli.flags import parse_config
from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.config.resolve import resolve
from a2c.envs.single import probe_spaces
from a2c.learner import Learner
from a2c.policy import step
from a2c.processes.errors import WorkerError
from a2c.rollout import Rollout
from a2c.run.checkpoint import load_checkpoint
from a2c.run.trainer import Trainer

FLAGS = ["--preset", "cartpole", "--algorithm", "ga3c", "--num-envs", "4", "--no-progress", "--env-timeout", "5"]
LSTM = ["--preset", "cartpole-lstm", *FLAGS[2:]]
NOISE = [*FLAGS, "--exploration-noise", "1.5", "--exploration-rewards", "100000"]


@pytest.fixture(params=[FLAGS, LSTM], ids=["mlp", "lstm"])
def setting(request):
    """Config, spaces, learner and compute of a small run."""
    config = parse_config(request.param)
    spaces = probe_spaces(config)
    config = resolve(config, spaces.obs_shape)
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces, compute)
        with torch.no_grad():  # an untrained network returns nearly the same for every observation
            for parameter in learner.net.parameters():
                parameter.mul_(3)
        yield config, spaces, learner, compute


def rnn_state_size(net):
    return getattr(net, "rnn_state_size", 0)


def rows(obs):
    """Observations `[B, 4]` as tuples."""
    return [tuple(row) for row in obs.tolist()]


def test_remote_network_returns_the_outputs_of_the_network(setting):
    _, spaces, learner, compute = setting
    all_buffers, remotes = {}, []
    for rows in (3, 1, 2):
        buffers = make_buffers(rows, spaces, rnn_state_size(learner.net))
        here, there = Pipe()
        all_buffers[here] = buffers
        remotes.append(RemoteNetwork(buffers, there))
    draw = torch.Generator().manual_seed(0)
    requests = [torch.randn(rows, 4, generator=draw) for rows in (3, 1, 2)]
    rnn_states = [torch.randn(len(obs), rnn_state_size(learner.net), generator=draw) for obs in requests]
    starts = [torch.arange(len(obs)) % 2 == 0 for obs in requests]
    replies = [None] * 3

    def request(i):
        replies[i] = step(remotes[i], requests[i], rnn_states[i], starts[i])

    with closing(Predictor(learner, all_buffers, compute)) as predictor:
        for updates in (0, 5):
            learner.updates = updates
            predictor.sync()
            threads = [threading.Thread(target=request, args=(i,)) for i in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            for i in range(3):
                with torch.no_grad():
                    torch.testing.assert_close(replies[i], step(learner.net, requests[i], rnn_states[i], starts[i]))
            with torch.no_grad():
                next(learner.net.parameters()).add_(0.1)  # the predictor's copy changes at `sync` alone
        predictor.check()
    assert [remote.versions for remote in remotes] == [[0, 5]] * 3


def test_predictor_failure_is_raised_by_check(setting):
    _, spaces, learner, compute = setting
    here, there = Pipe()
    with closing(Predictor(learner, {here: make_buffers(1, spaces, 0)}, compute)) as predictor:
        predictor.net = None
        there.send_bytes(b"?")
        predictor._thread.join(10)
        with pytest.raises(WorkerError, match=r"the predictor failed: .*(NoneType|shape)"):
            predictor.check()


def test_recovery_restarts_a_predictor_that_fails(tmp_path, capsys):
    whole = Trainer(
        parse_config([*FLAGS, "--workers", "2", "--total-env-steps", "6000", "--run-dir", str(tmp_path / "run")])
    )
    training_step, broken = whole.algorithm.training_step, []

    def fail(requests):
        raise RuntimeError("CUDA out of memory")

    def step_and_break():
        progress = training_step()
        if whole.learner.env_steps > 2000 and not broken:
            broken.append(whole.algorithm.predictor)
            broken[0]._predict = fail
        return progress

    whole.algorithm.training_step = step_and_break
    assert whole.run().exit_code == 0 and broken
    assert "the predictor failed: RuntimeError: CUDA out of memory: restarted at" in capsys.readouterr().out


def test_a_predictor_that_never_has_memory_ends_the_run_with_advice_and_its_last_checkpoint(
    tmp_path, capsys, monkeypatch
):
    def fail(predictor, requests):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

    monkeypatch.setattr(Predictor, "_predict", fail)
    assert train([*FLAGS, "--workers", "2", "--max-worker-restarts", "1", "--run-dir", str(tmp_path / "run")]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: out of memory: use fewer environments") and "the predictor failed" in line
    assert f"the last checkpoint is kept: {tmp_path / 'run' / 'latest.pt'} (" in line


@pytest.mark.parametrize("setting", [FLAGS, LSTM, NOISE], ids=["mlp", "lstm", "noise"], indirect=True)
def test_actor_collects_as_a_collector_with_the_network_would(setting):
    # Nothing is learned here, so policy lag does not matter and the experience must be the same, bit for bit.
    config, spaces, learner, compute = setting
    config = replace(config, workers=2)
    before, taken = copy.deepcopy(learner.net), []
    learner.reward_count = config.exploration_rewards // 2  # of a resumed run
    noise = config.exploration_noise / 2
    algorithm = GA3C(config, spaces, learner, compute)
    learner.learn = lambda rollout, num_minibatches: taken.extend(copy.deepcopy(rollout).split(num_minibatches // 2))
    algorithm.start(new_run=True)
    expected = []
    for part in make_tasks(config, 0):
        collector = Collector([part.make_envs()], before, config.rollout_steps, compute, part.sampling_seed)
        expected.append([copy.deepcopy(collector.collect(noise=noise).rollout) for _ in range(3)])
    theirs = [[], []]
    while min(map(len, theirs)) < 3:
        algorithm.training_step()
        # What was shown after a rollout begins the actor's next one.
        for rollout in taken:
            for played, wanted in zip(theirs, expected, strict=True):
                begins = played[-1].next_obs if played else wanted[0].obs[0]
                if torch.equal(rollout.obs[0], begins):
                    played.append(rollout)
        taken.clear()
    algorithm.close()
    for played, wanted in zip(theirs, expected, strict=True):
        for mine, own in zip(played, wanted, strict=False):
            for name in ("obs", "actions", "rewards", "terminated", "truncated", "starts", "final_index", "final_obs"):
                assert torch.equal(getattr(mine, name), getattr(own, name)), name
            for name in ("values", "log_probs", "rnn_state", "next_rnn_state", "final_rnn_state"):
                torch.testing.assert_close(getattr(mine, name), getattr(own, name))


@pytest.mark.parametrize("rewards", [64, 10_000])
def test_actors_have_no_noise_once_the_run_has_learned_from_enough_rewards(rewards, tmp_path):
    flags = ["--workers", "1", "--exploration-noise", "5", "--exploration-rewards", str(rewards)]
    whole = Trainer(parse_config([*FLAGS, *flags, "--total-env-steps", "640", "--run-dir", str(tmp_path / "run")]))
    learn, apart = whole.learner.learn, []

    def compare(rollout, num_minibatches):
        log_probs = whole.learner.net(rollout.obs.flatten(0, 1))[0].log_softmax(1)
        log_probs = log_probs.gather(1, rollout.actions.flatten()[:, None]).squeeze(1)
        apart.append(float((log_probs - rollout.log_probs.flatten()).abs().max().detach()))
        learn(rollout, num_minibatches=num_minibatches)

    whole.learner.learn = compare
    assert whole.run().exit_code == 0
    assert len(apart) == 5  # rollouts of 32 decisions in 4 environments, each paid
    assert whole.learner.reward_count == min(rewards, 640)
    assert apart[0] > 0.1 and (max(apart[1:]) < 1e-3) == (rewards == 64)


def test_ga3c_learns_every_decision_once_with_its_reward(tmp_path):
    flags = ["--num-envs", "6", "--num-minibatches", "4", "--workers", "4", "--total-env-steps", "5000"]
    whole = Trainer(parse_config([*FLAGS, *flags, "--run-dir", str(tmp_path / "run")]))
    learn, batches, steps = whole.learner.learn, [], []

    def keep(rollout, num_minibatches):
        batches.append(copy.deepcopy(rollout))
        steps.append(num_minibatches)
        learn(rollout, num_minibatches=num_minibatches)

    whole.learner.learn = keep
    assert whole.run().exit_code == 0
    state = load_checkpoint(tmp_path / "run" / "latest.pt")
    # a2c has 1.5 environments in a minibatch. One alone is not enough, as two actors of four have it.
    assert steps == [batch.actions.shape[1] * 4 // 6 for batch in batches] and min(steps) > 0
    assert state["updates"] == sum(steps)
    assert state["env_steps"] == sum(map(len, batches)) >= 5000
    ends = sum(int(batch.terminated.sum()) for batch in batches)
    assert ends > 20 and all((batch.rewards == 1.0).all() for batch in batches)
    # Each environment's windows follow one another: what was shown after one begins the next.
    chains = {tuple(after.tolist()) for batch in batches for after in batch.next_obs}
    begun = [tuple(first.tolist()) for batch in batches for first in batch.obs[0]]
    assert len(set(begun)) == len(begun)
    assert sum(first not in chains for first in begun) == 6  # the very first window of each environment


def test_policy_lag_is_the_number_of_updates_between_acting_and_learning(setting):
    config, spaces, learner, compute = setting
    algorithm = GA3C(config, spaces, learner, compute)
    learn, policy_lags = learner.learn, []

    def note(rollout, num_minibatches):
        own = (num_minibatches * config.epochs - 1) / 2  # all steps but the first come after others of this rollout
        expected = learner.updates + own - float(rollout.policy_version.mean())
        learn(rollout, num_minibatches=num_minibatches)
        policy_lags.append((learner.policy_lag - own, pytest.approx(expected - own)))

    learner.learn = note
    algorithm.start(new_run=True)
    while len(policy_lags) < 40:
        algorithm.training_step()
    algorithm.close()
    assert all(policy_lag == expected and policy_lag >= 0 for policy_lag, expected in policy_lags)
    assert policy_lags[0][0] == 0.0  # nobody had learned yet
    assert max(policy_lag for policy_lag, _ in policy_lags) > 0
    assert learner.metrics()["policy_lag"] == learner.policy_lag


def test_actors_wait_for_a_slow_learner(setting):
    config, spaces, learner, compute = setting
    config = replace(config, workers=2)
    algorithm = GA3C(config, spaces, learner, compute)
    learn, policy_lags = learner.learn, []

    def slowly(rollout, num_minibatches):
        time.sleep(0.03)  # in which an actor could collect many rollouts
        learn(rollout, num_minibatches=num_minibatches)
        policy_lags.append(learner.policy_lag)

    learner.learn = slowly
    algorithm.start(new_run=True)
    while len(policy_lags) < 40:
        algorithm.training_step()
    algorithm.close()
    # Mostly the other's rollout was learned meanwhile, in two steps; one step comes before the second of its own.
    assert statistics.median(policy_lags) <= 4


@pytest.mark.parametrize("setting", [FLAGS], indirect=True)
def test_ga3c_deals_the_whole_queue_anew_in_every_epoch(setting):
    config, spaces, learner, compute = setting
    config = replace(config, workers=2, epochs=3, shuffle=True)
    learner.config, dealt, queue = config, [], []
    learn, step = learner.learn, learner.take_step
    learner.learn = lambda rollout, num_minibatches: (
        queue.append(rollout.obs.clone()),
        learn(rollout, num_minibatches=num_minibatches),
    )
    learner.replace_step(lambda minibatch, *rest: dealt.append(rows(minibatch.obs)) or step(minibatch, *rest))
    algorithm = GA3C(config, spaces, learner, compute)
    algorithm.start(new_run=True)
    with closing(algorithm):
        while not queue:
            algorithm.training_step()
    obs = queue[0]  # [T, n, 4]
    each = len(dealt) // 3
    epochs = [[row for minibatch in dealt[low : low + each] for row in minibatch] for low in (0, each, 2 * each)]
    assert each == obs.shape[1] >= 2 and len(dealt) == 3 * each
    assert all(sorted(epoch) == sorted(rows(obs.flatten(0, 1))) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    windows = [set(rows(obs[:, n])) for n in range(obs.shape[1])]
    assert not any(set(minibatch) <= window for minibatch in dealt for window in windows)


def test_the_predictor_acts_with_what_was_learned_and_the_newest_statistics():
    flags = ["--preset", "pong-fast", "--backend", "sync", "--num-envs", "4", "--rollout-steps", "4", *FLAGS[2:4]]
    config = parse_config([*flags, "--workers", "2", "--threads", "1", "--no-progress"])
    spaces = probe_spaces(config)
    config = resolve(config, spaces.obs_shape)
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces, compute)
        learner.set_counts(100, 50, 0)  # a resumed run
        algorithm = GA3C(config, spaces, learner, compute)
        with closing(algorithm):
            algorithm.start(new_run=True)
            assert algorithm.predictor.version == 50
            before = copy.deepcopy(algorithm.predictor.net.state_dict())
            while learner.updates == 50:
                algorithm.training_step()
            after, learned = algorithm.predictor.net.state_dict(), learner.replica.state_dict()
            assert algorithm.predictor.version == learner.updates
            assert all(torch.equal(after[name], learned[name]) for name in learned)
            changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("norm" in name for name in changed) and any("norm" not in name for name in changed)


def test_learn_weights_samples_with_policy_lag(setting):
    learner = setting[2]
    rollout = Rollout.empty(4, torch.zeros(2, 4), rnn_state_size(learner.net))
    rollout.log_probs.fill_(5.0)  # so that a weight of exp(log pi - 5) is far below 1
    learner.learn(rollout, [rollout])
    assert learner.metrics()["ratio"] == 1.0
    learner.learn(rollout, [rollout])  # its version is 0, the network has seen one update
    assert learner.metrics()["ratio"] < 0.02 and learner.policy_lag == 1.0


def test_resolve_sets_log_eps_for_ga3c_alone():
    assert resolve(parse_config(FLAGS), (4,)).log_eps == 1e-6
    assert resolve(parse_config(["--preset", "cartpole"]), (4,)).log_eps == 0.0
    assert resolve(parse_config([*FLAGS, "--log-eps", "0"]), (4,)).log_eps == 0.0


def test_an_observation_crosses_to_the_device_once(setting, monkeypatch):
    config, spaces, learner, compute = setting
    config = replace(config, workers=2)
    learner.config, learned, crossed = config, [], []
    cross = predictor_module.to_device
    size = math.prod(spaces.obs_shape)

    def count(tensor, device):
        if tensor.numel() == 2 * size and tensor.shape[1:] == spaces.obs_shape:
            crossed.append(len(tensor))
        return cross(tensor, device)

    monkeypatch.setattr(predictor_module, "to_device", count)
    algorithm = GA3C(config, spaces, learner, compute)
    learner.learn = lambda rollout, num_minibatches: learned.append(copy.deepcopy(rollout))
    algorithm.start(new_run=True)
    with closing(algorithm):
        while len(learned) < 4:
            algorithm.training_step()
    rollouts = sum(map(len, learned))
    # Besides, at most a rollout of each of the two actors that nobody has learned yet, and what comes after it.
    assert rollouts <= sum(crossed) <= rollouts + 2 * 2 * (config.rollout_steps + 2) < 2 * rollouts


class Recorder:
    """A stream that notes what it is told to wait for."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


def test_sync_orders_the_streams_of_predictor_and_trainer(setting, monkeypatch):
    _, _, learner, compute = setting
    log = []
    predictor = Predictor(learner, {}, compute)
    predictor.close()
    predictor.stream = Recorder("predictor", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Recorder("trainer", log))
    monkeypatch.setattr(predictor_module, "sync_replica", lambda mine, theirs: log.append("copy"))
    predictor.sync()
    assert log == ["trainer waits for predictor", "copy", "predictor waits for trainer"]

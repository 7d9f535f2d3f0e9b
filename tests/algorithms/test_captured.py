"""A run that replays its steps, as on a GPU, gives the parameters of one that does not: on the CPU, bit for bit."""

import copy
from contextlib import closing

import pytest
import torch
from toys import same

from a2c.algorithms.captured import CapturedSteps
from a2c.cli.commands import train
from a2c.cli.flags import parse_config
from a2c.compute.compute import Compute
from a2c.compute.graphs import EagerReplay
from a2c.config.config import Config
from a2c.config.resolve import allows_cuda_graphs
from a2c.run.checkpoint import load_checkpoint
from a2c.run.trainer import Trainer

CARTPOLE = ["--preset", "cartpole", "--shuffle", "--epochs", "2", "--num-minibatches", "5", "--total-env-steps", "2048"]
NOISE = [*CARTPOLE, "--exploration-noise", "1.5", "--exploration-rewards", "1200"]
PONG = ["--preset", "pong-fast", "--backend", "sync", "--num-envs", "16", "--rollout-steps", "5", "--total-env-steps"]
PONG += ["240", "--num-minibatches", "3", "--threads", "2"]

PLAIN = "--no-cuda-graphs"


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Replay on the CPU, too."""
    init = Compute.__init__

    def replaying(self, config, ranks=None):
        init(self, config, ranks)
        self.cuda_graphs = allows_cuda_graphs(config)

    monkeypatch.setattr(Compute, "__init__", replaying)


def trained(folder, flags):
    """The last checkpoint of a run with `flags`, which say whether it replays its decisions and steps."""
    run = Trainer(parse_config([*flags, "--no-progress", "--run-dir", str(folder)]))
    assert run.run().exit_code == 0
    replays = PLAIN not in flags
    assert all(isinstance(policy.captured, EagerReplay) is replays for policy in run.algorithm.collector.policies)
    assert isinstance(run.learner.step, CapturedSteps) is replays
    return load_checkpoint(folder / "latest.pt")


@pytest.mark.parametrize(
    "flags",
    [
        CARTPOLE,
        NOISE,
        [*PONG, "--precision", "float32"],
        [*PONG, "--precision", "bfloat16"],
        [*PONG, "--no-normalize-obs"],
    ],
    ids=["cartpole", "noise", "pong", "pong bfloat16", "pong classic"],
)
def test_replayed_run_gives_the_same_parameters_bit_for_bit(flags, tmp_path):
    plain, replayed = trained(tmp_path / "a", [*flags, PLAIN]), trained(tmp_path / "b", flags)
    for name, value in plain["network"].items():
        assert torch.equal(value, replayed["network"][name]), name
    for number, moments in plain["optimizer"]["state"].items():
        assert all(torch.equal(value, replayed["optimizer"]["state"][number][name]) for name, value in moments.items())
    assert plain["metrics"] == pytest.approx(replayed["metrics"], rel=1e-6)
    for one, other in zip(plain["algorithm"]["policies"], replayed["algorithm"]["policies"], strict=True):
        assert torch.equal(one["generator"], other["generator"])


def test_replayed_run_prepares_a_replay_for_each_size_and_kind_of_minibatch(tmp_path):
    config = parse_config([*CARTPOLE, "--no-progress", "--run-dir", str(tmp_path / "run")])
    run = Trainer(config)
    assert run.run().exit_code == 0
    replays = run.learner.step.replays
    assert set(replays) == {(103, False), (103, True), (102, True)}  # 512 decisions in 5 minibatches
    assert all(isinstance(replay, EagerReplay) for replay in replays.values())


def test_preparing_replays_changes_neither_parameters_nor_moments_nor_generators(tmp_path):
    config = parse_config([*CARTPOLE, "--no-progress", "--run-dir", str(tmp_path / "run")])
    run = Trainer(config)
    steps, learner = run.learner.step, run.learner
    run.start()
    with run.compute.pool:
        minibatch, _ = next(learner._minibatches(run.algorithm.collector.collect().rollout, config.num_minibatches))
        before = copy.deepcopy((learner.net.state_dict(), learner.optimizer.state_dict()["state"]))
        states = [policy.generator.get_state() for policy in run.algorithm.collector.policies]
        steps._prepare((minibatch.obs, minibatch.actions, minibatch.returns, minibatch.log_probs), False)
        run.algorithm.collector.capture()
        after = (learner.net.state_dict(), learner.optimizer.state_dict()["state"])
        assert same(before, after)
        now = [policy.generator.get_state() for policy in run.algorithm.collector.policies]
        assert all(map(torch.equal, states, now))
    run.close()


def test_environments_that_are_started_again_have_replays_too(tmp_path):
    with closing(Trainer(parse_config([*CARTPOLE, "--no-progress", "--run-dir", str(tmp_path / "run")]))) as run:
        run.start()
        run.algorithm.training_step()
        first = run.algorithm.collector.policies[0].captured
        run.algorithm.close(failed=True)
        run.algorithm.start(new_run=False)
        second = run.algorithm.collector.policies[0].captured
        assert isinstance(second, EagerReplay) and second is not first
        assert run.algorithm.training_step().env_steps == 512


def test_replayed_steps_follow_the_schedules(tmp_path):
    schedule = ["--learning-rate", "0.01", "--lr-final", "0", "--schedule-end", "0.5", "--entropy-coef", "0.5"]
    flags = [*CARTPOLE, *schedule, "--entropy-final", "0", "--entropy-hold", "0"]
    plain, replayed = trained(tmp_path / "a", [*flags, PLAIN]), trained(tmp_path / "b", flags)
    constant = trained(tmp_path / "c", [*flags, "--lr-final", "1", "--entropy-final", "1"])
    network = plain["network"]
    assert all(torch.equal(value, replayed["network"][name]) for name, value in network.items())
    assert not all(torch.equal(value, constant["network"][name]) for name, value in network.items())


def test_a_replayed_run_and_a_plain_one_continue_each_other(tmp_path):
    whole = trained(tmp_path / "whole", [*CARTPOLE, PLAIN])
    for first, then in (([PLAIN], ["--cuda-graphs"]), ([], [PLAIN])):
        folder = tmp_path / "-".join(["run", *first])
        trained(folder, [*CARTPOLE, *first, "--stop-after", "1024"])
        assert train(["--resume", str(folder), "--stop-after", "0", *then]) == 0
        network = load_checkpoint(folder / "latest.pt")["network"]
        assert all(torch.equal(value, network[name]) for name, value in whole["network"].items())


def test_what_can_be_replayed():
    assert allows_cuda_graphs(Config()) and allows_cuda_graphs(Config.from_preset("pong-fast"))
    others = [{"cuda_graphs": False}, {"algorithm": "a3c"}, {"algorithm": "ga3c"}, {"shuffle": False}]
    others += [{"optimizer": "rmsprop"}, {"network": "lstm"}, {"network": "custom"}]
    others += [{"sliding_batch": 32, "gae_lambda": 1.0, "num_minibatches": 1, "epochs": 1}]
    assert not any(allows_cuda_graphs(Config(**settings)) for settings in others)

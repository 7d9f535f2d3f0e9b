"""The average of the parameters: its values, that it acts, and that its run is saved, continued and evaluated."""

import copy
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from experience import random_rollout
from runs import opened, tiny, untimed_rows
from torch import nn
from toys import NO_DEFAULTS, same, spaces

from a2c.compute.average import Average
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.learner import Learner
from a2c.networks import make_network
from a2c.normalizers import PixelNorm
from a2c.rollout import Rollout
from a2c.run.checkpoint import CheckpointError, load_checkpoint
from a2c.run.policies import kept_policies
from a2c.run.trainer import Trainer
from a2c.tools.load import load_policy

CONFIG = replace(NO_DEFAULTS, network="mlp", num_envs=8, num_minibatches=2, epochs=2, average_decay=0.6)


class OneNumber(nn.Module):
    """A parameter, and a buffer that is not learned."""

    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value]))
        self.register_buffer("count", torch.tensor([value]))


def set_to(net, value):
    with torch.no_grad():
        net.value.fill_(value)
        net.count.fill_(value)


def some_rollout(seed=0):
    rollout = random_rollout(6, 8, seed)
    scaled = {name: getattr(rollout, name) / 255 for name in ("obs", "next_obs", "final_obs")}
    return replace(rollout, **scaled, log_probs=torch.full((6, 8), -1.0))


def test_average_is_exponential_and_forgets_faster_at_first():
    net = OneNumber(1.0)
    with closing(Compute(Config(precision="float32"))) as compute:
        average, expected = Average(net, compute, decay=0.6), 1.0
    for updates, value in enumerate((2.0, -3.0, 4.0, 5.0, 7.0, 0.5, 1.5, 1.0, 2.0, 9.0, 11.0, 10.0, 8.0), start=1):
        set_to(net, value)
        average.update(net, updates)
        decay = min(0.6, (1 + updates) / (10 + updates))  # 2/11, 3/12, ..., 13/22 is 0.59
        expected = decay * expected + (1 - decay) * value
        assert float(average.net.value.detach()) == pytest.approx(expected)
    assert decay == 0.6 and float(average.net.count) == 1.0
    average.sync(net)
    assert float(average.net.count) == 8.0  # buffers are not averaged
    assert average.replica is average.net and float(net.value.detach()) == 8.0


def test_average_acts_in_the_precision_of_the_run_with_the_statistics_of_the_network():
    config = Config(network="small", frame_size=42, precision="bfloat16")
    net = make_network(config, (4, 42, 42), 6, True)
    with closing(Compute(config)) as compute:
        average = Average(net, compute, decay=0.9)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    average.update(net, 1000)
    average.sync(net)
    assert average.replica is not average.net and average.replica.normalizer is net.normalizer
    assert average.net.normalizer is net.normalizer
    for of_net, mean, acts in zip(
        net.parameters(), average.net.parameters(), average.replica.parameters(), strict=True
    ):
        torch.testing.assert_close(mean, of_net.detach() - 0.9)
        assert torch.equal(acts.detach(), mean.to(acts.dtype))
    assert next(average.replica.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("shuffle", [True, False])
def test_learner_steps_the_network_by_ratios_to_the_average_and_averages_after_each_step(shuffle):
    config = replace(CONFIG, shuffle=shuffle)
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4,), 3), compute)
        assert learner.actor is learner.average.net and learner.actor is not learner.net
        expected, off_policy = copy.deepcopy(learner.net), []

        def spy(minibatch, size, off, entropy_coef):
            off_policy.append(off)
            result = learner.take_step(minibatch, size, off, entropy_coef)
            decay = min(0.6, (2 + learner.updates) / (11 + learner.updates))
            with torch.no_grad():
                for mean, value in zip(expected.parameters(), learner.net.parameters(), strict=True):
                    mean.copy_(decay * mean + (1 - decay) * value)
            return result

        learner.replace_step(spy)
        for seed in range(3):
            learner.learn(some_rollout(seed))
    assert off_policy == [True] * 12  # the first step of a rollout, too: another network has acted
    assert learner.metrics()["ratio"] < 1.0
    for mean, acts, value in zip(
        expected.parameters(), learner.actor.parameters(), learner.net.parameters(), strict=True
    ):
        torch.testing.assert_close(acts, mean.detach())
        assert not torch.equal(acts, value)


def test_what_is_learned_is_what_a_learner_without_an_average_learns_from_the_same_rollout():
    """The average changes who acts, and nothing in the steps on a rollout whose ratios are known."""
    with closing(Compute(CONFIG)) as compute:
        averaged, plain = (
            Learner(replace(CONFIG, average_decay=decay), spaces((4,), 3), compute) for decay in (0.6, 0.0)
        )
        assert plain.average is None and plain.actor is plain.replica
        rollout = some_rollout()
        rollout.policy_version -= 1.0  # else the plain one takes its first step without ratios
        averaged.learn(rollout)
        plain.learn(rollout)
    assert same(averaged.net.state_dict(), plain.net.state_dict())
    assert same(averaged.state_dict()["learned"], plain.state_dict()["network"]) and "learned" not in plain.state_dict()


def test_average_takes_the_decisions_of_a_run(tmp_path):
    trainer = opened(tiny(tmp_path / "run", average_decay=0.9, num_minibatches=2))
    learner = trainer.learner
    for _ in range(2):
        trainer.algorithm.training_step()
    before = copy.deepcopy(learner.average.net)
    rollout = trainer.algorithm.collector.collect().rollout
    log_probs = torch.log_softmax(before(rollout.obs.flatten(0, 1))[0], 1)
    chosen = log_probs.gather(1, rollout.actions.flatten()[:, None]).squeeze(1)
    torch.testing.assert_close(rollout.log_probs.flatten(), chosen.detach())
    learned = torch.log_softmax(learner.net(rollout.obs.flatten(0, 1))[0], 1)
    assert not torch.allclose(learned.gather(1, rollout.actions.flatten()[:, None]).squeeze(1), chosen, atol=1e-5)
    trainer.close()


def acts_as_averaged(learner):
    """Whether what acts is the average in the precision of the run, with the buffers of what learns."""
    pairs = zip(learner.average.net.parameters(), learner.actor.parameters(), strict=True)
    buffers = zip(learner.net.buffers(), learner.actor.buffers(), strict=True)
    return all(torch.equal(mean.to(acts.dtype), acts) for mean, acts in pairs) and all(
        torch.equal(mine, theirs) for mine, theirs in buffers
    )


class ScaledNorm(PixelNorm):
    """Pixel statistics and a scale that is learned."""

    def __init__(self, frame_shape):
        super().__init__(frame_shape)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, obs):
        return super().forward(obs) * self.scale


class TwiceHeld(nn.Module):
    """A network whose normaliser is a layer, too."""

    def __init__(self, norm):
        super().__init__()
        self.normalizer = norm
        self.layers = nn.Sequential(norm, nn.Flatten(), nn.Linear(16, 4))

    def forward(self, obs):
        outputs = self.layers(obs)
        return outputs[:, :3], outputs[:, 3:]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [(None, "float32"), (None, "bfloat16"), (PixelNorm, "float32"), (ScaledNorm, "float32")],
)
def test_what_acts_after_learning_and_after_loading_is_the_average_with_the_statistics_of_now(kind, precision):
    config = replace(CONFIG, precision=precision, network="custom" if kind else "mlp", num_envs=4)

    def made(compute):
        draw = torch.Generator().manual_seed(0)
        network = (lambda shape, actions: TwiceHeld(kind((4, 4)))) if kind else None
        shape = (1, 4, 4) if kind else (4,)
        learner = Learner(config, spaces(shape, 3, stacked=bool(kind)), compute, network=network)
        rollout = Rollout.empty(6, torch.randint(0, 255, (4, *shape), generator=draw).float())
        rollout.obs += torch.randint(0, 255, rollout.obs.shape, generator=draw)
        return learner, replace(rollout, log_probs=torch.full((6, 4), -1.0))

    with closing(Compute(config)) as compute:
        learner, rollout = made(compute)
        for _ in range(2):
            learner.learn(rollout)
            assert acts_as_averaged(learner)
        state = copy.deepcopy(learner.state_dict())
        other, _ = made(compute)
        other.load_state_dict(state)
        assert acts_as_averaged(other) and same(state["network"], other.policy_state())
        if kind:
            assert int(other.net.normalizer.count) > 0


def run(run_dir, *stops, **changes):
    for i, stop in enumerate(stops):
        where = {"run_dir": None, "resume": run_dir} if i else {"run_dir": run_dir}
        config = tiny(**{"epochs": 2, "keep_policy_every": 160, "stop_after": stop} | changes | where)
        assert Trainer(config).run().exit_code == 0
    return load_checkpoint(run_dir / "latest.pt")


def test_resumed_run_gives_the_bits_of_one_without_a_stop_and_its_policies_are_averages(tmp_path):
    straight, resumed = run(tmp_path / "a", 480, average_decay=0.9), run(tmp_path / "b", 240, 480, average_decay=0.9)
    for part in ("network", "learned", "optimizer", "algorithm", "scores", "metrics", "updates"):
        assert same(straight[part], resumed[part]), part
    assert untimed_rows(tmp_path / "a", "metrics.csv")[-1] == untimed_rows(tmp_path / "b", "metrics.csv")[-1]
    assert not same(straight["network"], straight["learned"])
    policy = load_checkpoint(kept_policies(tmp_path / "a")[480])
    assert same(policy["network"], straight["network"]) and "learned" not in policy
    net = load_policy(tmp_path / "a" / "latest.pt")[1]
    assert same(net.state_dict(), straight["network"])


def test_average_can_begin_and_end_where_a_run_is_resumed(tmp_path):
    plain = run(tmp_path / "run", 240)
    assert "learned" not in plain
    begun = Trainer(tiny(None, resume=tmp_path / "run", average_decay=0.9))
    assert same(begun.learner.average.net.state_dict(), plain["network"])
    begun.close()
    averaged = run(tmp_path / "averaged", 240, average_decay=0.9)
    ended = Trainer(tiny(None, resume=tmp_path / "averaged"))
    assert same(ended.learner.net.state_dict(), averaged["learned"])  # and not the average
    ended.close()


DAMAGES = {
    "no dictionary": (lambda value: None, "bad learned, not a dictionary"),
    "other names": (lambda value: {"value": torch.zeros(3)}, "belongs to another network"),
    "NaN": (lambda value: {name: torch.full_like(x, torch.nan) for name, x in value.items()}, "is NaN or infinite"),
    "float64": (lambda value: {name: x.double() for name, x in value.items()}, "belongs to another network"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_learned_parameters_are_refused_in_one_line(damage, tmp_path):
    change, message = DAMAGES[damage]
    bad = change(run(tmp_path / "run", 80, average_decay=0.9)["learned"])
    torch.save(torch.load(tmp_path / "run" / "latest.pt", weights_only=True) | {"learned": bad}, tmp_path / "new.pt")
    (tmp_path / "new.pt").replace(tmp_path / "run" / "latest.pt")
    with pytest.raises(CheckpointError, match=message) as refusal:
        Trainer(tiny(None, resume=tmp_path / "run", average_decay=0.9))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("algorithm", ["a3c", "ga3c"])
def test_algorithms_that_act_in_other_processes_refuse_an_average(algorithm):
    with pytest.raises(ValueError, match=f"average_decay must be 0 for algorithm {algorithm}.*got 0.99"):
        Config(algorithm=algorithm, average_decay=0.99)


def test_transitions_without_ratios_refuse_an_average():
    with pytest.raises(ValueError, match=r"average_decay must be 0 when sliding_batch is set, got 0.99"):
        Config(sliding_batch=32, gae_lambda=1.0, num_minibatches=1, epochs=1, average_decay=0.99)

"""Ranks: who has which environments, and that any number of them learns what one process would."""

import copy
import signal
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from experience import random_rollout
from thread_ranks import on_ranks
from torch import nn
from toys import NO_DEFAULTS, spaces

from a2c.algorithms.a2c import A2C
from a2c.algorithms.base import TrainingStats, merge_stats
from a2c.compute.compute import Compute
from a2c.compute.ranks import Ranks, check_shareable
from a2c.config.config import Config
from a2c.envs.make import run_seeds
from a2c.envs.vector_env import Episode, in_order
from a2c.learner import Learner
from a2c.networks import make_network
from a2c.normalizers import FrameNorm, PixelNorm
from a2c.processes.errors import WorkerError
from a2c.processes.place import Place, find_place
from a2c.processes.signals import StopRequest
from a2c.rollout import Rollout

CONFIG = replace(NO_DEFAULTS, network="mlp", num_envs=11, num_minibatches=3, epochs=2, lr_final=1.0)
ENVIRON = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}


class Drawn(nn.Module):
    """A network whose parameters are not drawn from torch's generator."""

    def __init__(self, draw):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.head.weight.data = torch.from_numpy(draw.normal(size=(4, 4))).float()

    def forward(self, obs):
        outputs = self.head(obs.float())
        return outputs[:, :3], outputs[:, 3:]


class BatchNormed(nn.Module):
    """A network with buffers that each forward pass changes, and one that no checkpoint holds."""

    def __init__(self, draw):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.register_buffer("noise", torch.from_numpy(draw.normal(size=4)).float(), persistent=False)

    def forward(self, obs):
        outputs = self.head(self.norm(obs.float()) + self.noise)
        return outputs[:, :3], outputs[:, 3:]


def some_rollout(seed: int, rnn_state_size: int = 0) -> Rollout:
    """Experience of 11 environments whose log_probs are those of another policy."""
    rollout = random_rollout(6, 11, seed)
    scaled = {name: getattr(rollout, name) / 255 for name in ("obs", "next_obs", "final_obs")}
    draw = torch.Generator().manual_seed(seed)
    states = {
        name: torch.randn(len(getattr(rollout, name)), rnn_state_size, generator=draw)
        for name in ("rnn_state", "next_rnn_state", "final_rnn_state")
    }
    starts = torch.cat([torch.rand(1, 11, generator=draw) < 0.5, (rollout.terminated | rollout.truncated)[:-1]])
    return replace(rollout, **scaled, **states, starts=starts, log_probs=torch.full((6, 11), -1.0))


def own_part(rollout: Rollout, rank: int, size: int) -> Rollout:
    """The columns `n % size == rank` of a rollout."""
    columns = [rollout.slice_envs(n, n + 1) for n in range(rank, rollout.actions.shape[1], size)]
    return Rollout.join(columns)


def with_images(rollout: Rollout) -> Rollout:
    """The same with stacks of frames as observations, which are darker in every second environment."""
    draw = torch.Generator().manual_seed(0)
    stacks = {
        name: torch.randint(0, 256, (*getattr(rollout, name).shape[:-1], 4, 42, 42), generator=draw, dtype=torch.uint8)
        for name in ("obs", "next_obs", "final_obs")
    }
    stacks["obs"][:, 1::2] //= 4
    return replace(rollout, **stacks)


@cache
def first_parameters(network="mlp", shape=(4,)):
    return make_network(replace(CONFIG, network=network, lstm_units=8), shape, 3, len(shape) == 3).state_dict()


def learned(ranks: Ranks, config: Config, rollouts: list[Rollout]) -> Learner:
    shape = tuple(rollouts[0].obs.shape[2:])
    with closing(Compute(config, ranks)) as compute:
        learner = Learner(config, spaces(shape, 3, stacked=len(shape) == 3), compute)
        first = first_parameters(config.network, shape)  # threads draw from one generator, in any order
        learner.net.load_state_dict(first)
        for rollout in rollouts:
            learner.learn(own_part(rollout, ranks.rank, ranks.size))
            learner.update_metrics()
    return learner


@pytest.mark.parametrize("size", [2, 3, 11])
@pytest.mark.parametrize(
    "changes",
    [{}, {"shuffle": False}, {"shuffle": False, "num_minibatches": 11}, {"epochs": 1}, {"exploration_noise": 1.0}],
    ids=str,
)
def test_any_number_of_ranks_learns_what_one_process_learns(size, changes):
    config = replace(CONFIG, **changes)
    rollouts = [some_rollout(seed) for seed in (0, 1)]
    alone = learned(Ranks(), config, rollouts)
    assert alone.updates == 2 * config.epochs * config.num_minibatches
    assert bool(alone.reward_count) == bool(config.exploration_noise)
    assert not torch.allclose(
        first_parameters("mlp", (4,))["policy.2.weight"], alone.net.state_dict()["policy.2.weight"], atol=1e-3
    )
    for learner in on_ranks(size, lambda ranks: learned(ranks, config, rollouts)):
        check_equal(learner, alone)


@pytest.mark.parametrize("size", [2, 3, 11])
def test_any_number_of_ranks_learns_what_one_process_learns_with_a_recurrent_network(size):
    config = replace(CONFIG, network="lstm", lstm_units=8)
    rollouts = [some_rollout(seed, rnn_state_size=16) for seed in (0, 1)]
    alone = learned(Ranks(), config, rollouts)
    others = [replace(rollouts[0], rnn_state=rollouts[0].rnn_state.flip(0)), rollouts[1]]
    with pytest.raises(AssertionError):  # the rnn_states matter
        check_equal(learned(Ranks(), config, others), alone)
    for learner in on_ranks(size, lambda ranks: learned(ranks, config, rollouts)):
        check_equal(learner, alone)


@pytest.mark.parametrize("network", ["small", "lstm"])
def test_two_ranks_learn_the_pixel_statistics_of_one_process(network):
    config = replace(CONFIG, network=network, lstm_units=8, epochs=1)
    rollouts = [with_images(some_rollout(seed, rnn_state_size=16 * (network == "lstm"))) for seed in (0, 1)]
    alone = learned(Ranks(), config, rollouts).normalizer
    assert int(alone.count) == 2 * 2 * 11  # of every fourth step
    for learner in on_ranks(2, lambda ranks: learned(ranks, config, rollouts)):
        torch.testing.assert_close(learner.normalizer.state_dict(), alone.state_dict(), rtol=1e-5, atol=0)


def custom_learner(net: nn.Module, compute: Compute) -> Learner:
    """The learner of a network of one's own."""
    return Learner(replace(CONFIG, network="custom"), spaces((4,), 3), compute, network=lambda shape, actions: net)


def check_equal(learner: Learner, alone: Learner) -> None:
    """A rank's learner has the counts, the last gradients, the parameters and the metrics of one that is `alone`."""
    assert (learner.env_steps, learner.updates) == (alone.env_steps, alone.updates)
    assert learner.reward_count == alone.reward_count
    gradients = [[parameter.grad for parameter in one.net.parameters()] for one in (learner, alone)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(learner.net.state_dict(), alone.net.state_dict(), rtol=1e-4, atol=1e-5)
    assert learner.last_metrics == pytest.approx(alone.last_metrics, rel=1e-3, abs=1e-5)


def test_parameters_of_all_ranks_are_bitwise_the_same():
    rollouts = [some_rollout(seed) for seed in range(3)]
    first, *others = on_ranks(3, lambda ranks: learned(ranks, CONFIG, rollouts))
    for other in others:
        assert all(map(torch.equal, first.net.parameters(), other.net.parameters()))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", [PixelNorm, FrameNorm])
def test_statistics_of_pixels_are_those_of_all_ranks(kind, size):
    frames = [
        torch.randint(0, 256, (4, 7, 5, 6), dtype=torch.uint8) // (batch + 1) for batch in range(3)
    ]  # [T, N, H, W]
    alone = PixelNorm((5, 6)) if kind is PixelNorm else FrameNorm()
    parts = copy.deepcopy(alone)

    def feed(ranks):
        norm = copy.deepcopy(parts)
        for batch in frames:
            norm.update(batch[:, ranks.rank :: ranks.size].flatten(0, 1), ranks, steps=4)
        return norm

    for batch in frames:
        alone.update(batch.flatten(0, 1))
    for norm in on_ranks(size, feed):
        assert int(norm.count) == int(alone.count) == 3 * 4 * 7
        torch.testing.assert_close(norm.state_dict(), alone.state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_envs", [4, 5, 50])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_environment_belongs_to_one_rank(num_envs, size):
    ranks = [Ranks(Place(rank, size)) for rank in range(size)]
    rows = [list(one.rows(num_envs)) for one in ranks]
    assert sorted(row for one in rows for row in one) == list(range(num_envs))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1
    order = np.random.default_rng(0).permutation(7 * num_envs)[: 3 * num_envs]
    for one, mine in zip(ranks, rows, strict=True):
        low, high = one.columns(2, 4)
        assert mine[low:high] == [row for row in mine if 2 <= row < 4]
        kept = [number for number in order if number % num_envs in mine]
        numbers = [mine.index(number % num_envs) + number // num_envs * len(mine) for number in kept]
        assert one.own(order, num_envs).tolist() == numbers


def test_columns_of_all_ranks_are_joined_in_the_order_of_the_environments():
    whole = torch.arange(22).view(2, 11)
    for joined in on_ranks(3, lambda ranks: ranks.join_columns(whole[:, ranks.rank :: 3])):
        assert torch.equal(joined, whole)


def test_an_error_on_one_rank_is_raised_on_every_rank_and_reported_by_one():
    def fail(ranks):
        def work():
            if ranks.rank == 1:
                raise WorkerError("environment 3 failed", "its trace")
            return ranks.rank

        with pytest.raises(WorkerError, match="environment 3 failed") as caught:
            ranks.on_every_rank(work)
        assert ranks.on_every_rank(lambda: ranks.rank) == [0, 1, 2]
        return caught.value

    errors = on_ranks(3, fail)
    assert all(error.trace == "its trace" for error in errors)
    assert [error.__notes__ for error in errors] == [["reported by rank 1"]] * 3
    assert errors[1].__traceback__.tb_next is not None and len({id(error) for error in errors}) == 3


def test_what_rank_0_does_is_done_once_and_known_to_all():
    calls = []
    assert on_ranks(3, lambda ranks: ranks.on_rank_0(lambda: calls.append(ranks.rank) or "done")) == ["done"] * 3
    assert calls == [0]

    def fail(ranks):
        with pytest.raises(ValueError, match="in use") as caught:
            ranks.on_rank_0(lambda: (_ for _ in ()).throw(ValueError("in use")))
        return caught.value.__notes__

    assert on_ranks(3, fail) == [["reported by rank 0"]] * 3


def test_networks_that_were_drawn_differently_become_those_of_rank_0():
    def parameters(ranks):
        with closing(Compute(CONFIG, ranks)) as compute:
            net = Drawn(np.random.default_rng(ranks.rank))
            learner = custom_learner(net, compute)
            return learner.net.head.weight.detach().clone()

    first, *others = on_ranks(3, parameters)
    assert first.abs().sum() > 0 and all(torch.equal(first, other) for other in others)


def test_buffers_of_ones_own_network_are_those_of_rank_0():
    def buffers(ranks):
        with closing(Compute(CONFIG, ranks)) as compute:
            net = BatchNormed(np.random.default_rng(ranks.rank))
            learner = custom_learner(net, compute)
            states = [copy.deepcopy(dict(net.named_buffers()))]
            for seed in range(2):
                net(torch.full((3, 4), float(ranks.rank)))  # as it acts, on what this rank alone sees
                learner.learn(own_part(some_rollout(seed), ranks.rank, ranks.size))
                states.append(copy.deepcopy(dict(net.named_buffers())))
        return states

    first, *others = on_ranks(3, buffers)
    assert not any(torch.equal(one["norm.running_mean"], other["norm.running_mean"]) for one, other in pairwise(first))
    for other in others:
        torch.testing.assert_close(first, other, rtol=0, atol=0)


def test_ranks_with_other_devices_or_precisions_are_refused():
    def check(ranks):
        with pytest.raises(ValueError, match="the same on every rank, got cpu and bfloat16, cpu and float32"):
            ranks.check_same(f"cpu and {'bfloat16' if ranks.rank else 'float32'}")
        ranks.check_same("cpu and float32")

    on_ranks(2, check)


def test_ranks_follow_a_signal_to_one_of_them_at_the_same_step():
    def follow(ranks):
        request, agreed = StopRequest(), StopRequest()
        steps = 0
        while not agreed and steps < 50:
            steps += 1
            agreed.join(ranks.all_gather(request))
            if ranks.rank == 1 and steps == 7:  # after what was gathered: it counts at the next step
                request.handle(signal.SIGTERM, None)
                assert not agreed
        return steps, agreed.number

    assert on_ranks(3, follow) == [(8, signal.SIGTERM)] * 3


def test_episodes_of_all_ranks_come_in_the_order_in_which_they_ended():
    def stats(*ended):
        episodes = [Episode(env, float(env), 7, t) for t, env in ended]
        return TrainingStats(10, episodes, {"env": 1.0 + len(ended), "act": 2.0, "learn": 0.0})

    merged = merge_stats([stats((1, 2), (4, 0)), stats((1, 1)), stats()], workers=3)
    assert merged.env_steps == 30 and [episode.env for episode in in_order(merged.episodes)] == [1, 2, 0]
    assert merged.seconds == pytest.approx({"env": 2.0, "act": 2.0, "learn": 0.0})


def test_find_place_reads_what_torchrun_sets_and_nothing_else():
    assert find_place({}) == find_place({name: ENVIRON[name] for name in ("RANK", "WORLD_SIZE")}) == Place()
    assert find_place(ENVIRON) == Place(3, 4, 1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "a3c"}, "algorithm must be a2c with more than one rank, got a3c"),
        ({"sliding_batch": 64}, "sliding_batch must be 0 with more than one rank, got 64"),
        ({"num_envs": 3}, "num_envs must be at least the number of ranks, 4, got 3"),
    ],
)
def test_ranks_refuse_what_they_cannot_share(changes, message):
    config = Config()
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=message):
        check_shareable(config, 4)


def test_cores_of_a_host_are_divided_among_its_ranks(monkeypatch):
    monkeypatch.setattr("a2c.compute.compute.available_cores", lambda: 12)
    with closing(Compute(Config(num_envs=50), Ranks(Place(1, 8, 1, 4)))) as compute:
        assert (compute.threads, compute.env_groups) == (3, 1)  # 7 environments here: a group of at least 8
    with closing(Compute(Config(num_envs=50, threads=5), Ranks(Place(1, 2, 1, 2)))) as compute:
        assert (compute.threads, compute.env_groups) == (5, 3)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_games_of_a_run_do_not_depend_on_the_number_of_ranks(size):
    config = replace(CONFIG, env="CartPole-v1", backend="sync", seed=5, num_envs=7)
    learner = Learner(config, spaces((4,), 2), Compute(config))

    def seeds(ranks):
        with closing(Compute(config, ranks)) as compute:
            algorithm = A2C(config, spaces((4,), 2), learner, compute)
            algorithm.start(new_run=False)
            own = [seed for envs in algorithm.groups for seed in envs.seeds]
            algorithm.close()
        return own, [policy.generator.initial_seed() for policy in algorithm.collector.policies]

    parts = on_ranks(size, seeds)
    assert [own for own, _ in parts] == [run_seeds(config).envs[rank::size] for rank in range(size)]
    sampling = [seed for _, own in parts for seed in own]
    assert len(sampling) == len(set(sampling)) >= size

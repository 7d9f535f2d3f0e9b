"""The model of scaling: its seconds by hand, what a target needs, and the measurement that it is fitted to."""

import json
from pathlib import Path

import pytest
from scaling import parse_layout
from scaling_model import Model, fit

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model():
    return Model(
        per_decision=1e-3, per_step=2e-3, steps=10, rollout_steps=5, num_envs=20, numbers=990, measured={2: 3e-3}
    )


def test_seconds_are_work_shared_by_the_cores_and_steps_that_are_not(model):
    assert model.bytes == 4000
    assert model.seconds(1, 1, 20) == pytest.approx(100 * 1e-3 + 10 * 2e-3)
    assert model.seconds(1, 2, 20) == pytest.approx(100 * 1e-3 / 2 + 10 * 2e-3)
    assert model.seconds(2, 1, 20) == pytest.approx(100 * 1e-3 / 2 + 10 * (2e-3 + 3e-3))
    across = 2 * 3 / 4 * 4000 / 1.25e9 + 6 * 50e-6
    assert model.seconds(4, 1, 20, hosts=2) == pytest.approx(100 * 1e-3 / 4 + 10 * (2e-3 + across))
    assert model.speed(1, 1, 20) == pytest.approx(100 / model.seconds(1, 1, 20))
    assert model.core_hours(3.6e6) == pytest.approx(0.25)


def test_cores_and_hosts_are_the_fewest_that_reach_the_target(model):
    cores = model.cores(5_000, 200)
    assert model.speed(cores, 1, 200) >= 5_000 > model.speed(cores - 1, 1, 200)
    hosts = model.hosts(20_000, 2_000, ranks=8, threads=2)
    assert hosts > 1 == model.hosts(100, 2_000, ranks=8)
    assert model.speed(8 * hosts, 2, 2_000, hosts) >= 20_000 > model.speed(8 * hosts - 8, 2, 2_000, hosts - 1)


def test_a_target_that_no_number_of_cores_reaches_has_no_answer(model):
    limit = 5 * 20 / (10 * 2e-3)  # every rank takes the optimiser steps in full
    assert model.cores(limit, 20) is None and model.hosts(limit, 20, ranks=4) is None


def test_the_fit_gives_back_the_speed_of_one_rank():
    figures = json.loads((ROOT / "results" / "scaling" / "pong-fast.json").read_text())
    model = fit(figures)
    alone = next(row for row in figures["layouts"] if (row["ranks"], row["threads"]) == (1, 1))
    assert min(alone["speeds"]) <= model.speed(1, 1, model.num_envs) <= max(alone["speeds"])
    assert model.per_decision > 0 and model.measured[2] > 0


def test_the_fit_needs_one_rank_of_one_thread_and_an_all_reduce_of_two():
    figures = json.loads((ROOT / "results" / "scaling" / "pong-fast.json").read_text())
    with pytest.raises(ValueError, match="layouts must include 1x1 and one of two ranks"):
        fit(figures | {"layouts": figures["layouts"][1:]})
    with pytest.raises(ValueError, match="layouts must include 1x1 and one of two ranks"):
        fit(figures | {"all_reduce": {"numbers": 1, "milliseconds": {}}})


@pytest.mark.parametrize("text", ["4", "x2", "0x1", "4x", "4x2x1", "-1x2", ""])
def test_a_layout_is_ranks_and_threads(text):
    assert parse_layout("4x2") == (4, 2)
    with pytest.raises(ValueError, match="layouts must be ranks and threads, like 4x2, got"):
        parse_layout(text)

"""A3C: the objective of A2C, updated by many workers; every decision counted; no process waits for ever."""

import copy
import csv
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from toys import ClosingEnv, has_rows, same, spaces, wait_for

from a2c.algorithms.a3c import A3C, SharedCounters, run_worker
from a2c.algorithms.worker_tasks import make_tasks, worker_count
from a2c.cli import commands as cli
from a2c.cli.flags import parse_config
from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.config.config import Config
from a2c.config.resolve import resolve
from a2c.envs.make import make_envs, run_seeds
from a2c.envs.single import make_env, probe_spaces
from a2c.learner import Learner, Shared
from a2c.normalizers import slots_like
from a2c.policy import UNREWARDED, Policy
from a2c.rollout import Rollout
from a2c.run.checkpoint import load_checkpoint
from a2c.run.trainer import ALGORITHMS, Trainer
from a2c.tools.evaluate import evaluate

CARTPOLE = ["--preset", "cartpole", "--num-envs", "4", "--log-every", "1e-6", "--no-progress", "--env-timeout", "5"]
PONG = ["--preset", "pong-fast", "--backend", "sync", "--no-progress", "--rollout-steps", "5", "--num-minibatches", "2"]
ONE = {
    "cartpole, one environment": [*CARTPOLE, "--num-envs", "1", "--total-env-steps", "640"],
    "cartpole, sixteen": [*CARTPOLE, "--num-envs", "16", "--total-env-steps", "2048"],  # enough for two threads
    "rmsprop": [*CARTPOLE, "--optimizer", "rmsprop", "--learning-rate", "0.0007", "--total-env-steps", "640"],
    "exploration": [*CARTPOLE, "--exploration-noise", "1.5", "--total-env-steps", "640"],
    "rnn_state": ["--preset", "cartpole-lstm", "--num-envs", "4", "--no-progress", "--total-env-steps", "640"],
    "pong, float32": [*PONG, "--num-envs", "1", "--precision", "float32", "--total-env-steps", "40"],
    "pong, bfloat16": [*PONG, "--num-envs", "2", "--precision", "bfloat16", "--total-env-steps", "40"],
    "pong, native": [*PONG, "--backend", "native", "--num-envs", "4", "--total-env-steps", "60"],
}


def run(run_dir, flags, algorithm="a3c", workers=1, code=0):
    config = parse_config([*flags, "--algorithm", algorithm, "--workers", str(workers), "--run-dir", str(run_dir)])
    whole = Trainer(config)
    assert whole.run().exit_code == code
    return load_checkpoint(run_dir / "latest.pt")


@pytest.mark.parametrize("flags", ONE.values(), ids=ONE.keys())
def test_a3c_with_one_worker_equals_a2c_with_one_thread_bit_for_bit(flags, tmp_path):
    alone = run(tmp_path / "a3c", [*flags, "--threads", "0"], "a3c")  # one per core: a worker has one in any case
    together = run(tmp_path / "a2c", [*flags, "--threads", "1"], "a2c")
    assert alone["updates"] == together["updates"] > 1
    for part in ("network", "env_steps", "rewards", "scores", "metrics"):
        assert same(alone[part], together[part]), part
    assert same(alone["optimizer"]["state"], together["optimizer"]["state"])


def test_a3c_counts_every_decision_of_many_workers_which_end_together(tmp_path):
    state = run(tmp_path / "run", [*CARTPOLE, "--num-envs", "7", "--total-env-steps", "5000"], workers=3)
    # Whoever is in a rollout when the count is reached finishes it: 32 steps of 3 + 2 environments at most.
    assert 5000 <= state["env_steps"] < 5000 + 32 * 7
    played = sum(int(row["length"]) for row in episode_rows(tmp_path / "run"))
    assert state["env_steps"] - 7 * 500 <= played <= state["env_steps"]
    assert state["updates"] > 100 and state["metrics"]["policy_lag"] >= 0
    assert state["optimizer"]["state"][0]["step"] == pytest.approx(state["updates"], rel=0.02)  # races lose a few


def test_a3c_counts_the_rewards_of_many_workers_also_after_a_resume(tmp_path):
    flags = [*CARTPOLE, "--num-envs", "7", "--exploration-noise", "1", "--exploration-rewards", "9000"]
    flags += ["--total-env-steps", "4000"]
    state = run(tmp_path / "run", [*flags, "--stop-after", "2000"], workers=3)
    assert 2000 <= state["rewards"] == state["env_steps"] < 4000  # CartPole pays for every decision
    assert Trainer(parse_config(["--resume", str(tmp_path / "run"), "--stop-after", "0"])).run().exit_code == 0
    state = load_checkpoint(tmp_path / "run" / "latest.pt")
    assert 4000 <= state["rewards"] == state["env_steps"]


def episode_rows(run_dir):
    with open(run_dir / "episodes.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_make_tasks_gives_workers_different_seeds():
    config = resolve(Config.from_preset("cartpole"), (4,))
    parts = make_tasks(replace(config, algorithm="a3c", workers=3), 0)
    assert [len(part.seeds) for part in parts] == [6, 6, 4]  # three, three and two of the eight batches
    seeds = [seed for part in parts for seed in part.seeds]
    assert len(set(seeds)) == 16 and len({part.sampling_seed for part in parts}) == 3
    later = make_tasks(replace(config, algorithm="a3c", workers=3), 1000)
    assert not set(seeds) & {seed for part in later for seed in part.seeds}


@pytest.mark.parametrize(("num_envs", "batches"), [(16, 8), (50, 5), (16, 1), (3, 3), (11, 8), (10, 4), (7, 3)])
def test_make_tasks_gives_a3c_workers_the_batches_of_a2c(num_envs, batches):
    def sizes(config):
        rollout = Rollout.empty(1, torch.zeros(config.num_envs, 4))
        return [part.actions.shape[1] for part in rollout.split(config.num_minibatches)]

    config = Config(num_envs=num_envs, num_minibatches=batches, algorithm="a3c")
    for workers in range(1, batches + 1):
        parts = make_tasks(replace(config, workers=workers), 0)
        assert len(parts) == workers
        assert sorted(size for part in parts for size in sizes(part.config)) == sorted(sizes(config))
        assert [seed for part in parts for seed in part.seeds] == run_seeds(config).envs


@pytest.mark.parametrize(("num_envs", "batches"), [(4, 10), (3, 32), (16, 32), (7, 8)])
def test_make_tasks_shares_more_batches_than_environments(num_envs, batches):
    config = Config(num_envs=num_envs, num_minibatches=batches, algorithm="a3c")
    for workers in range(1, num_envs + 1):
        parts = make_tasks(replace(config, workers=workers), 0)
        assert [seed for part in parts for seed in part.seeds] == run_seeds(config).envs
        assert sum(part.config.num_minibatches for part in parts) == batches
        for part in parts:
            assert abs(part.config.num_minibatches - batches * len(part.seeds) / num_envs) < 1


def test_worker_count_of_a3c_is_at_most_the_environments(monkeypatch):
    monkeypatch.setattr("a2c.algorithms.worker_tasks.available_cores", lambda: 64)
    assert worker_count(Config(num_envs=4, num_minibatches=10, algorithm="a3c")) == 4


@pytest.mark.parametrize(
    ("name", "cores", "workers"),
    [("a3c", 2, 0), ("a3c", 64, 0), ("a3c", 2, 1), ("a3c", 2, 2), ("a3c", 2, 5), ("ga3c", 1, 0), ("ga3c", 64, 0)],
)
def test_the_size_of_a_minibatch_does_not_depend_on_the_machine(name, cores, workers, monkeypatch):
    monkeypatch.setattr("a2c.algorithms.worker_tasks.available_cores", lambda: cores)
    flags = [*CARTPOLE, "--algorithm", name, "--workers", str(workers), "--total-env-steps", "2000"]
    config = resolve(parse_config([*flags, "--num-envs", "10", "--num-minibatches", "5"]), (4,))
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4,), 2), compute)
        algorithm = ALGORITHMS[name](config, probe_spaces(config), learner, compute)
        algorithm.start(new_run=True)
        assert len(algorithm.workers.processes) == (workers or (min(5, cores) if name == "a3c" else min(10, 2 * cores)))
        while learner.env_steps < 1500:
            algorithm.training_step()
        algorithm.drain()
        algorithm.close()
        own = 2 * 32  # decisions of a2c's minibatches: two environments, a window of 32
        size = learner.env_steps / learner.updates
        assert size == own if name == "a3c" else own <= size < 2 * own  # ga3c: never smaller


@pytest.mark.parametrize(("name", "envs", "batches"), [("num_minibatches", 8, 4), ("num_envs", 4, 8)])
def test_config_refuses_more_a3c_workers_than_batches_or_environments(name, envs, batches, capsys):
    flags = [*CARTPOLE, "--shuffle", "--num-envs", str(envs), "--num-minibatches", str(batches)]
    assert cli.train([*flags, "--algorithm", "a3c", "--workers", "5"]) == 2
    err = capsys.readouterr().err
    assert f"workers must be at most {name} (4) for algorithm a3c" in err and "got 5" in err
    assert f"raise {name}" in err and err.count("\n") == 1


def test_learner_with_a_shared_network_copies_gradients_and_never_accumulates_them():
    # The classic line `shared._grad = local.grad` makes them one tensor; since torch 2.0 `zero_grad` drops the
    # local one, so every later gradient is added to those before.
    config = resolve(Config.from_preset("cartpole"), (4,))
    with closing(Compute(config)) as compute:
        shared = Learner(config, spaces((4,), 2), compute)
        worker = Learner(config, spaces((4,), 2), compute, Shared(shared.net, shared.optimizer, None, 0))
        assert worker.replica is not shared.net
        mine, theirs = list(worker.replica.parameters()), list(shared.net.parameters())
        assert not {p.data_ptr() for p in mine} & {p.data_ptr() for p in theirs}
        envs = make_envs(config)
        collector = Collector([envs], worker.replica, 32, compute)
        for _ in range(3):
            before = copy.deepcopy(worker.replica)
            rollout = copy.deepcopy(collector.collect().rollout)
            rollout.policy_version.fill_(worker.updates)
            worker.learn(rollout, [rollout])
            fresh = Learner(config, spaces((4,), 2), compute)
            fresh.net.load_state_dict(before.state_dict())
            rollout.policy_version.fill_(0)
            fresh.learn(rollout, [rollout])
            for ours, alone in zip(theirs, fresh.net.parameters(), strict=True):
                assert torch.equal(ours.grad, alone.grad)
            assert all(p.grad is None for p in mine)  # nothing is left that a later gradient could be added to
        envs.close()


@pytest.mark.parametrize(
    ("counted", "noise", "change"),
    [(200.0, 0.5, 8 * 32), (-900.0, 1.0, 8 * 32), (900.0, 0.0, 0.0), (600.0, 0.1, 100.0)],  # 300 of earlier sessions
)
def test_run_worker_counts_what_all_workers_have_done(counted, noise, change, monkeypatch):
    # Another worker has made 40,000 decisions and 900 updates; schedules and lags of this one follow the sum. Workers
    # that change the count of rewards at once may leave any, so that of all together is kept within 0 and 1,000.
    config = replace(Config.from_preset("cartpole"), algorithm="a3c", workers=2, total_env_steps=100_000)
    config = resolve(replace(config, lr_final=0.0, schedule_end=1.0, exploration_noise=1.0), (4,))
    task = make_tasks(config, 0)[0]
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4,), 2), compute)
        rates, step = [], learner.optimizer.step

        def note(*args):
            rates.append(float(learner.optimizer.param_groups[0]["lr"]))
            return step(*args)

        learner.optimizer.step = note
        env_steps, updates = torch.tensor([[0, 40_000, 0], [0, 900, 0]])
        reward_count = torch.tensor([0.0, counted, 300.0]).double()
        counted_at = torch.tensor([0, 40_000])
        counters = SharedCounters(env_steps, updates, reward_count, counted_at, torch.tensor(40_001), [], 16 * 32)
        sent, noises, perturb = [], [], Policy.perturb
        monkeypatch.setattr(Policy, "perturb", lambda self, scale: (noises.append(scale), perturb(self, scale)))
        run_worker(
            task, spaces((4,), 2), learner.net, learner.optimizer, counters, True, SimpleNamespace(send=sent.append)
        )
    report = sent[-1]
    assert noises == [pytest.approx(noise)]
    assert reward_count.tolist() == pytest.approx([change, counted, 300]) and report.reward_count == reward_count[0]
    assert counted_at.tolist() == [40_000 + 8 * 32, 40_000]
    assert rates == [pytest.approx(config.learning_rate * 0.6)] * 4  # 60,000 of 100,000 decisions are left
    assert env_steps.tolist() == [8 * 32, 40_000, 0] and updates.tolist() == [4, 900, 0]
    assert report.updates == 4 and report.stats.env_steps == 8 * 32 and report.metrics["policy_lag"] == 1.5


@pytest.mark.parametrize("met", [False, True])
def test_run_worker_takes_rewards_back_unless_another_worker_has_met_one_meanwhile(met):
    def make_unpaid():
        return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda _: 0.0)

    gym.register(f"Unpaid{met}-v0", entry_point=make_unpaid)
    settings = {"algorithm": "a3c", "workers": 2, "exploration_noise": 1.0}
    config = resolve(Config.from_preset("cartpole", env=f"Unpaid{met}-v0", **settings), (4,))
    reward_count, counted_at = torch.tensor([0.0, 500.0, 0.0]).double(), torch.tensor([0, 30_000])
    env_steps, updates = torch.tensor([[0, 40_000, 0], [0, 900, 0]])
    counters = SharedCounters(env_steps, updates, reward_count, counted_at, torch.tensor(40_001), [], 16 * 32)
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4,), 2), compute)
        step = learner.optimizer.step

        def step_of_one(*args):
            counted_at[1] = 40_000 if met else 30_000  # the other worker learns from a rollout at the same time
            return step(*args)

        learner.optimizer.step = step_of_one
        pipe = SimpleNamespace(send=lambda _: None)
        run_worker(make_tasks(config, 0)[0], spaces((4,), 2), learner.net, learner.optimizer, counters, False, pipe)
    unrewarded = 40_000 + 8 * 32 - 30_000
    assert reward_count.tolist() == pytest.approx([0.0 if met else -unrewarded / UNREWARDED, 500.0, 0.0])
    assert int(counted_at[0]) == (0 if met else 40_000 + 8 * 32)


def test_run_worker_acts_with_the_pixel_statistics_of_all_workers(monkeypatch):
    gym.register("FlickerAll-v0", entry_point="troubled:Flicker")
    settings = {"num_envs": 4, "num_minibatches": 2, "rollout_steps": 5, "network": "small", "precision": "float32"}
    config = Config(env="FlickerAll-v0", backend="sync", algorithm="a3c", workers=2, **settings)
    config, counts, collect = resolve(config, (1, 12, 12)), [], Collector.collect

    def note(self, *args):
        counts.append(int(self.policies[0].net.normalizer.count))
        return collect(self, *args)

    monkeypatch.setattr(Collector, "collect", note)
    task = make_tasks(config, 0)[0]
    with closing(Compute(config)) as compute:
        learner = Learner(config, probe_spaces(config), compute)
        slots, rows = slots_like(learner.normalizer, 2), torch.zeros(3, dtype=torch.int64)
        slots[1].update(torch.full((100, 1, 12, 12), 7, dtype=torch.uint8))  # what the other worker has seen
        counters = SharedCounters(
            rows.clone(), rows.clone(), rows.double(), rows[:2].clone(), torch.tensor(1), slots, 20
        )
        pipe = SimpleNamespace(send=lambda _: None)
        run_worker(task, probe_spaces(config), learner.net, learner.optimizer, counters, True, pipe)
    assert counts == [100 + len(task.seeds)]


def test_workers_that_take_back_rewards_at_once_leave_a_checkpoint_that_can_be_resumed():
    config = resolve(Config.from_preset("cartpole", exploration_noise=1.0), (4,))
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4,), 2), compute)
        for _ in range(2):  # both had read a count of 5, and found no reward in 1,000 decisions
            learner.add_remote(1000, 1, -5.0, {})
        learner.add_remote(1000, 1, 5.0, {})  # the next one sees -5, and begins at 0
        assert learner.reward_count == -5.0 and learner.state_dict()["rewards"] == 0.0


def test_workers_begin_with_the_exact_counts_of_earlier_sessions(tmp_path):
    counts = [2**24 + 1, 2**24 + 3, 0.1]  # more than a float32 can count, and holds
    flags = [*CARTPOLE, "--algorithm", "a3c", "--workers", "2", "--run-dir", str(tmp_path / "run")]
    with closing(Trainer(parse_config(flags))) as begun:
        begun.learner.set_counts(*counts)
        begun.algorithm.start(new_run=False)
        assert [row.sum().item() for row in begun.algorithm.counters[:3]] == counts


@pytest.mark.parametrize("algorithm", ["a2c", "a3c", "ga3c"])
def test_start_feeds_the_first_observations_of_a_new_run_to_the_normalizer(algorithm, tmp_path):
    flags = [*PONG, "--num-envs", "2", "--algorithm", algorithm, "--workers", "0" if algorithm == "a2c" else "2"]
    counts = []
    for new_run in (True, False):
        with closing(Trainer(parse_config([*flags, "--run-dir", str(tmp_path / str(new_run))]))) as begun:
            begun.algorithm.start(new_run)
            counts.append(int(begun.learner.net.normalizer.count))
    assert counts == [2, 0]


class Counting(torch.nn.Module):
    """Has buffers that each forward pass changes."""

    def __init__(self, input_shape, n_actions):
        super().__init__()
        self.head = torch.nn.Linear(*input_shape, n_actions + 1)
        self.register_buffer("mean", torch.zeros(input_shape))
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, obs):
        self.mean.lerp_(obs.mean(0).float(), 0.1)
        self.passes += 1
        outputs = self.head((obs - self.mean).to(self.head.weight.dtype))
        return outputs[:, :-1], outputs[:, -1:]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_buffers_that_a_forward_pass_changes_reach_the_shared_network(precision):
    config = resolve(Config.from_preset("cartpole", network="custom", precision=precision), (4,))
    with closing(Compute(config)) as compute:
        shared = Learner(config, spaces((4,), 2), compute, network=Counting)
        alone = Learner(config, spaces((4,), 2), compute, network=Counting)
        worker = Learner(config, spaces((4,), 2), compute, Shared(shared.net, shared.optimizer, None, 0))
        envs = make_envs(config)
        rollout = copy.deepcopy(Collector([envs], worker.replica, 32, compute).collect().rollout)
        envs.close()
        acted = copy.deepcopy(worker.replica.state_dict())
        alone.net.load_state_dict(worker.net.state_dict())
        alone.replica.load_state_dict(acted)
        for learner in (worker, alone):
            for _ in range(2):
                learner.learn(rollout)
                assert torch.equal(learner.net.mean, learner.replica.mean)
        assert shared.net.passes == alone.net.passes > acted["passes"] > 32
        assert torch.equal(shared.net.mean, alone.net.mean)


def test_the_classic_line_accumulates():
    # What the test above guards against. Should a torch ever give 1, 1, 1 here, the warning in a3c.py can go.
    local, shared = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    optimizer, seen = torch.optim.SGD(shared.parameters(), lr=0.0), []
    for _ in range(3):
        optimizer.zero_grad()
        local(torch.ones(1, 1)).sum().backward()
        shared.weight._grad = local.weight.grad
        seen.append(shared.weight.grad.item())
    assert seen == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("algorithm", "sign"),
    [
        ("a3c", signal.SIGSTOP),
        ("ga3c", signal.SIGKILL),
        pytest.param("a3c", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("ga3c", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_recovery_replaces_a_worker_that_dies_or_hangs(algorithm, sign, tmp_path, capsys):
    flags = [*CARTPOLE, "--algorithm", algorithm, "--workers", "2", "--env-timeout", "2"]
    config = parse_config([*flags, "--total-env-steps", "1000000", "--run-dir", str(tmp_path / "run")])
    whole = Trainer(config)
    training_step, hit = whole.algorithm.training_step, []

    def advance_and_hit():
        progress = training_step()
        pid = whole.algorithm.workers.processes[1].pid
        if whole.learner.env_steps > 2000 and not hit:
            hit.append(pid)
            os.kill(pid, sign)
        if hit and pid != hit[0] and whole.learner.env_steps > 6000:
            signal.raise_signal(signal.SIGTERM)  # the new workers have played enough
        return progress

    whole.algorithm.training_step = advance_and_hit
    assert whole.run().exit_code == 128 + signal.SIGTERM
    out = capsys.readouterr().out
    said = "process of a worker died" if sign == signal.SIGKILL else "did not respond within 2 seconds"
    assert said in out and "every environment starts a new episode (try 1 of 3)" in out
    state = load_checkpoint(tmp_path / "run" / "latest.pt")
    assert state["env_steps"] > 6000 and all(p.isfinite().all() for p in state["network"].values())
    steps = [int(row["env_steps"]) for row in episode_rows(tmp_path / "run")]
    assert steps == sorted(steps)


@pytest.mark.parametrize("algorithm", ["a3c", "ga3c"])
def test_trainer_ends_with_the_traceback_of_an_environment_that_always_raises(algorithm, tmp_path, capsys):
    (tmp_path / "order").write_text("raise")
    name = f"Troubled{algorithm}-v0"
    gym.register(name, entry_point="troubled:TroubledEnv", kwargs={"file": str(tmp_path / "order")})
    flags = ["--env", name, "--algorithm", algorithm, "--workers", "2", "--num-envs", "4", "--max-worker-restarts", "1"]
    assert cli.train([*flags, "--no-progress", "--run-dir", str(tmp_path / "run")]) == 1
    err = capsys.readouterr().err
    assert "ValueError: the pole broke" in err and "Traceback" in err
    assert err.strip().splitlines()[-1].startswith("error: ") and "2 times without progress" in err


@pytest.mark.parametrize("algorithm", ["a3c", "ga3c"])
def test_trainer_ends_at_nan_and_keeps_the_checkpoint(algorithm, tmp_path, capsys):
    (tmp_path / "order").write_text("nan once")
    name = f"Nan{algorithm}-v0"
    gym.register(name, entry_point="troubled:TroubledEnv", kwargs={"file": str(tmp_path / "order")})
    flags = ["--env", name, "--algorithm", algorithm, "--workers", "2", "--num-envs", "4", "--no-progress"]
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert all(p.isfinite().all() for p in load_checkpoint(tmp_path / "run" / "latest.pt")["network"].values())


@pytest.mark.parametrize("algorithm", ["a3c", "ga3c"])
def test_trainer_is_interrupted_and_resumed_and_leaves_no_process(algorithm, tmp_path, capsys):
    flags = [*CARTPOLE, "--algorithm", algorithm, "--workers", "2", "--total-env-steps", "6000"]
    whole = Trainer(parse_config([*flags, "--run-dir", str(tmp_path / "run")]))
    training_step = whole.algorithm.training_step

    pids = set()

    def advance_and_interrupt():
        progress = training_step()
        pids.update(process.pid for process in whole.algorithm.workers.processes)
        if whole.learner.env_steps > 2000 and not whole.stop:  # `drain` comes here too
            signal.raise_signal(signal.SIGINT)
        return progress

    whole.algorithm.training_step = advance_and_interrupt
    assert whole.run().exit_code == 130
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)
    assert whole.algorithm.workers is None
    state = load_checkpoint(tmp_path / "run" / "latest.pt")
    assert 2000 < state["env_steps"] < 6000
    assert cli.train(["--resume", str(tmp_path / "run"), "--no-progress"]) == 0
    out = capsys.readouterr().out
    assert f"resumed at {state['env_steps']:,} env_steps; every environment starts a new episode" in out
    again = load_checkpoint(tmp_path / "run" / "latest.pt")
    assert again["env_steps"] >= 6000 and again["updates"] > state["updates"]


def test_drain_returns_the_rollouts_that_had_begun():
    config = resolve(parse_config([*CARTPOLE, "--algorithm", "a3c", "--workers", "2"]), (4,))
    with closing(Compute(config)) as compute:
        learner = Learner(config, spaces((4,), 2), compute)
        algorithm = A3C(config, probe_spaces(config), learner, compute)
        algorithm.start(new_run=True)
        played = algorithm.training_step().env_steps
        played += algorithm.drain().env_steps
        assert played == learner.env_steps == int(algorithm.counters.env_steps.sum()) > 0
        assert learner.updates == int(algorithm.counters.updates.sum())
        algorithm.close()


def test_a3c_with_cuda_prints_that_it_uses_the_cpu(tmp_path, capsys):
    state = run(tmp_path / "run", [*CARTPOLE, "--cuda", "--total-env-steps", "256"])
    assert "--cuda: workers of a3c share parameters in main memory, so this run uses the CPU" in capsys.readouterr().out
    assert all(value.device.type == "cpu" for value in state["network"].values())
    assert len(evaluate(tmp_path / "run", 1, cuda=True)) == 1


def test_snapshot_raises_for_parameters_that_another_process_made_nan(tmp_path):
    whole = Trainer(parse_config([*CARTPOLE, "--algorithm", "a3c", "--run-dir", str(tmp_path / "run")]))
    training_step = whole.algorithm.training_step

    def advance_and_poison():
        progress = training_step()
        with torch.no_grad():  # as a worker would, between two looks at its gradients
            next(whole.learner.net.parameters())[0] = float("nan")
        whole.state.saved_at = -(10**9)  # a checkpoint is due
        return progress

    whole.algorithm.training_step = advance_and_poison
    with pytest.raises(FloatingPointError):
        whole.run()
    assert all(p.isfinite().all() for p in load_checkpoint(tmp_path / "run" / "latest.pt")["network"].values())


def seen_by(part, frames):
    """The frames that a worker has fed: the first of each environment, then every fourth of a rollout of 5."""
    config = part.config
    games = [make_env(config, part.spec.fn, seed) for seed in part.seeds]
    obs = [game.reset(seed=seed)[0] for game, seed in zip(games, part.seeds, strict=True)]
    seen, t = [np.stack(obs)], 0
    count = len(games)
    while count < frames:
        if t % 5 in (0, 4):
            seen.append(np.stack(obs))
            count += len(games)
        steps = [game.step(0) for game in games]
        obs = [game.reset()[0] if step[2] else step[0] for game, step in zip(games, steps, strict=True)]
        t += 1
    return np.concatenate(seen)[:, -1].astype(np.float64)


@pytest.mark.parametrize("network", ["small", "lstm"])
def test_sync_merges_the_statistics_of_all_workers(network, tmp_path):
    gym.register(f"Flicker{network}-v0", entry_point="troubled:Flicker")
    flags = ["--env", f"Flicker{network}-v0", "--num-envs", "5", "--num-minibatches", "3", "--rollout-steps", "5"]
    flags = [*flags, "--backend", "sync", "--network", network, "--lstm-units", "8", "--total-env-steps", "500"]
    whole = Trainer(
        parse_config([*flags, "--algorithm", "a3c", "--workers", "3", "--no-progress", "--run-dir", str(tmp_path)])
    )
    parts = make_tasks(whole.config, 0)
    assert whole.run().exit_code == 0
    state = load_checkpoint(tmp_path / "latest.pt")
    counts = [int(slot.count) for slot in whole.algorithm.counters.statistics]
    assert len(counts) == 3 and all(count > 2 for count in counts)
    assert sum(counts) == state["network"]["normalizer.count"] == 5 + state["env_steps"] // 5 * 2
    frames = np.concatenate([seen_by(part, count) for part, count in zip(parts, counts, strict=True)])
    if network == "small":
        expected, exact = {"mean": frames.mean(0), "var": frames.var(0)}, 1e-3
    else:  # the last of some hundred frames weigh a few per cent more than the oldest
        bias = 1 - 0.9999 ** sum(counts)
        expected, exact = {"mean": bias * frames.mean(), "std": bias * frames.std((1, 2)).mean()}, 1e-2
    for name, number in expected.items():
        saved = state["network"][f"normalizer.{name}"].numpy().squeeze()
        np.testing.assert_allclose(saved, number, rtol=exact, err_msg=name)


@pytest.mark.parametrize("algorithm", ["a3c", "ga3c"])
def test_make_tasks_sends_environments_that_only_the_caller_registered(algorithm, tmp_path):
    gym.register(f"Local{algorithm}-v0", entry_point=lambda: gym.make("CartPole-v1"))
    flags = [*CARTPOLE, "--env", f"Local{algorithm}-v0", "--total-env-steps", "500"]
    assert run(tmp_path / "run", flags, algorithm, workers=2)["env_steps"] >= 500


@pytest.mark.parametrize(("seconds", "closed"), [(0.5, [2, 2]), (1e6, [])])
def test_workers_close_their_environments_at_the_end_and_one_that_hangs_does_not_fail_the_run(
    seconds, closed, tmp_path
):
    def closing_env():
        in_worker = multiprocessing.parent_process() is not None
        return ClosingEnv(seconds * in_worker, f"{tmp_path}/{os.getpid()}-{time.perf_counter_ns()}")

    gym.register(f"Closed{seconds}-v0", entry_point=closing_env)
    flags = [*CARTPOLE, "--env", f"Closed{seconds}-v0", "--total-env-steps", "500", "--env-timeout", "3"]
    assert run(tmp_path / "run", flags, workers=2)["env_steps"] >= 500
    pids = [path.name.split("-")[0] for path in tmp_path.iterdir() if path.name != "run"]
    assert sorted(pids.count(pid) for pid in set(pids) - {str(os.getpid())}) == closed


@pytest.mark.parametrize("algorithm", ["a3c", "ga3c"])
def test_train_command_solves_cartpole_with_a3c_and_ga3c(algorithm, tmp_path):
    flags = ["--preset", "cartpole", "--target-score", "195", "--no-progress"]
    state = run(tmp_path / "run", flags, algorithm, workers=2)
    assert state["scores"]["reached"] >= 195 and state["env_steps"] < 200_000


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["a3c", "ga3c"])
def test_trainer_that_is_killed_leaves_no_worker_of_a3c_and_ga3c(algorithm, tmp_path):
    flags = [*CARTPOLE, "--algorithm", algorithm, "--workers", "2", "--total-env-steps", "100000000"]
    command = [sys.executable, "-m", "a2c", "train", *flags, "--run-dir", str(tmp_path / "run")]
    trainer = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: has_rows(tmp_path / "run" / "metrics.csv"), 60)
    family = psutil.Process(trainer.pid).children(recursive=True)
    assert len(family) >= 3
    trainer.kill()
    trainer.wait()
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["format"]


@pytest.mark.parametrize(
    ("algorithm", "sign"),
    [("a3c", signal.SIGINT), pytest.param("ga3c", signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_trainer_stops_in_order_at_a_signal_to_the_whole_group(algorithm, sign, tmp_path):
    flags = [*CARTPOLE, "--algorithm", algorithm, "--workers", "2", "--total-env-steps", "100000000"]
    command = [sys.executable, "-m", "a2c", "train", *flags, "--run-dir", str(tmp_path / "run")]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    wait_for(lambda: has_rows(tmp_path / "run" / "metrics.csv"), 60)
    os.killpg(trainer.pid, sign)
    out, _ = trainer.communicate(timeout=60)
    assert trainer.returncode == 128 + sign and b"Traceback" not in out and b"restarted" not in out
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] > 0


@pytest.mark.parametrize(
    ("name", "was", "now"),
    [("algorithm", "a3c", "a2c"), ("env", "CartPole-v1", "CartPole-v0"), ("optimizer", "adam", "rmsprop")],
)
def test_train_command_refuses_to_resume_with_another_algorithm_env_or_optimizer(name, was, now, tmp_path, capsys):
    run(tmp_path / "run", [*CARTPOLE, "--total-env-steps", "256"])
    assert cli.train(["--resume", str(tmp_path / "run"), f"--{name}", now]) == 2
    assert f"is of {name} {was}, got {now}" in capsys.readouterr().err

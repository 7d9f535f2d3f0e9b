"""A run that is stopped and resumed gives the bits of one that was not stopped."""

import copy
import csv
import io
import os
import signal
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from contextlib import closing
from dataclasses import replace
from enum import IntEnum
from functools import partial

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from runs import opened, started, untimed_rows
from toys import play, same, wait_for

from a2c.cli.flags import parse_config
from a2c.config.config import Config
from a2c.envs.atari import AtariGame
from a2c.envs.make import run_seeds
from a2c.envs.single import find_spec, make_env
from a2c.envs.snapshot import SnapshotWrapper
from a2c.run.checkpoint import CheckpointError, load_checkpoint
from a2c.run.trainer import Trainer
from a2c.run.values import to_arrays, to_tensors


def run(run_dir, flags, stops):
    """A run that is stopped after each of `stops` env_steps and resumed; its last checkpoint."""
    for i, stop in enumerate(stops):
        where = ["--resume" if i else "--run-dir", str(run_dir)]
        given = [] if i else flags  # a resumed run has them in its config.json
        config = parse_config([*given, "--stop-after", str(stop), "--log-every", "1e-6", "--no-progress", *where])
        assert Trainer(config).run().exit_code == 0
    return load_checkpoint(run_dir / "latest.pt")


SHORT = ["--threads", "2", "--rollout-steps", "20"]
CASES = {
    "cartpole": ["--env", "CartPole-v1", "--backend", "sync", "--num-envs", "16", *SHORT],
    "exploration": [
        *("--preset", "cartpole", "--num-envs", "8", "--exploration-noise", "1.5", "--exploration-rewards", "600"),
        *SHORT,
    ],
    "frozen lake": ["--env", "FrozenLake-v1", "--backend", "sync", "--num-envs", "4", *SHORT],
    "pong async": ["--preset", "pong-fast", "--backend", "async", "--num-envs", "8", *SHORT],
    "sticky breakout": [
        *("--env", "ALE/Breakout-v5", "--backend", "sync", "--num-envs", "2", "--terminal-on-life-loss"),
        *("--precision", "bfloat16", "--network", "small", "--frame-size", "42", *SHORT),
    ],
    "lstm": ["--preset", "lstm", "--num-envs", "4", "--threads", "2", "--rollout-steps", "10"],
    "lstm, rmsprop": [
        *("--preset", "cartpole-lstm", "--optimizer", "rmsprop", "--rmsprop-eps-inside", "--num-envs", "8"),
        *("--rollout-steps", "20"),
    ],
    "book": ["--preset", "book", "--backend", "sync", "--num-envs", "3", "--network", "small", "--frame-size", "42"],
}


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
def test_trainer_resumed_gives_the_bits_of_a_run_without_a_stop(flags, tmp_path):
    num_envs = int(flags[flags.index("--num-envs") + 1])
    half, whole = 60 * num_envs, 120 * num_envs
    straight = run(tmp_path / "straight", flags, [whole])
    resumed = run(tmp_path / "resumed", flags, [half, whole])
    assert straight["env_steps"] == resumed["env_steps"] == whole
    for part in ("network", "optimizer", "algorithm", "scores", "updates", "rewards", "saved_best"):
        assert same(straight[part], resumed[part]), part
    for name in ("metrics.csv", "episodes.csv"):
        assert untimed_rows(tmp_path / "straight", name) == untimed_rows(tmp_path / "resumed", name)


@pytest.mark.slow
def test_trainer_resumed_after_a_signal_to_its_process_group(tmp_path):
    stopped = started(tmp_path / "stopped", "--backend", "async", "--threads", "2")
    wait_for(lambda: stopped.stdout.readline().count(" steps/s "))
    os.killpg(stopped.pid, signal.SIGTERM)
    stopped.communicate(timeout=60)
    assert stopped.returncode == 143
    at = load_checkpoint(tmp_path / "stopped" / "latest.pt")["env_steps"]
    resume = ["--resume", str(tmp_path / "stopped"), "--stop-after", str(at + 400), "--no-progress"]
    assert Trainer(parse_config(resume)).run().exit_code == 0
    config = parse_config(resume)
    assert Trainer(replace(config, run_dir=tmp_path / "straight", resume=None)).run().exit_code == 0
    resumed, straight = (load_checkpoint(tmp_path / name / "latest.pt") for name in ("stopped", "straight"))
    for part in ("network", "optimizer", "algorithm", "scores", "updates"):
        assert same(straight[part], resumed[part]), part


@pytest.mark.parametrize("until", ["0", "16"], ids=["begins to slide", "slides no more"])
def test_trainer_resumed_with_another_sliding_batch_continues_its_episodes(until, tmp_path, capsys):
    flags = ["--preset", "cartpole", "--backend", "sync", "--num-envs", "4", "--threads", "1", "--rollout-steps", "8"]
    run(tmp_path / "run", [*flags, "--gae-lambda", "1", "--num-minibatches", "1", "--sliding-batch", until], [64])
    now = 16 - int(until)
    resume = ["--resume", str(tmp_path / "run"), "--sliding-batch", str(now), "--stop-after", "128", "--no-progress"]
    assert Trainer(parse_config(resume)).run().exit_code == 0
    assert "resumed at 64 env_steps; its episodes continue" in capsys.readouterr().out
    state = load_checkpoint(tmp_path / "run" / "latest.pt")
    assert state["env_steps"] == 128 and (state["algorithm"]["windows"] is not None) == (now > 0)


def test_trainer_resumed_with_other_threads_starts_new_episodes(tmp_path, capsys):
    flags = ["--preset", "cartpole", "--num-envs", "16", "--threads", "2"]
    before = run(tmp_path / "run", flags, [512])
    resume = ["--resume", str(tmp_path / "run"), "--threads", "1", "--stop-after", "1024", "--no-progress"]
    assert Trainer(parse_config(resume)).run().exit_code == 0
    assert "resumed at 512 env_steps; every environment starts a new episode" in capsys.readouterr().out
    after = load_checkpoint(tmp_path / "run" / "latest.pt")
    assert [len(state["algorithm"]["policies"]) for state in (before, after)] == [2, 1]


@pytest.mark.parametrize("algorithm", ["a2c", "a3c", "ga3c"])
def test_trainer_resumed_has_seeds_of_its_own(algorithm, tmp_path, monkeypatch):
    flags = ["--preset", "cartpole", "--algorithm", algorithm, "--workers", "1" if algorithm != "a2c" else "0"]
    seen = []

    def spy(config, env_steps=0):
        seen.append(env_steps)
        return run_seeds(config, env_steps)

    for module in ("a2c", "worker_tasks"):
        monkeypatch.setattr(f"a2c.algorithms.{module}.run_seeds", spy)
    with closing(Trainer(parse_config([*flags, "--no-progress", "--run-dir", str(tmp_path / "run")]))) as begun:
        begun.learner.set_counts(1000, 0, 0)
        begun.algorithm.start(new_run=False)
    assert seen == [1000]


def test_trainer_resumes_native_environments_with_new_episodes(tmp_path, capsys):
    flags = ["--preset", "pong-fast", "--num-envs", "4", *SHORT]
    state = run(tmp_path / "run", flags, [80, 160])
    assert state["env_steps"] == 160
    assert "resumed at 80 env_steps; every environment starts a new episode" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["async", "sync"])
def test_trainer_resumed_with_native_environments_starts_new_episodes(backend, tmp_path, capsys):
    flags = ["--preset", "pong-fast", "--num-envs", "4", "--backend", backend, *SHORT]
    run(tmp_path / "run", flags, [80])
    config = parse_config(["--resume", str(tmp_path / "run"), "--backend", "native", "--stop-after", "160"])
    assert Trainer(replace(config, progress=False)).run().env_steps == 160
    assert "resumed at 80 env_steps; every environment starts a new episode" in capsys.readouterr().out


@pytest.mark.parametrize("env", ["PongNoFrameskip-v4", "ALE/Pong-v5", "ALE/MsPacman-v5", "CartPole-v1"])
def test_snapshot_restores_into_another_environment(env):
    def fresh(seed):
        new = SnapshotWrapper(make_env(Config(env=env), find_spec(env), seed))
        new.reset(seed=seed)
        return new

    first, other = fresh(3), fresh(4)
    actions = np.random.default_rng(0).integers(first.action_space.n, size=200)
    play(first, actions[:50])
    play(other, actions[:7])
    state = to_arrays(to_tensors(first.snapshot))
    expected = play(first, actions[50:])
    assert not same(play(other, actions[50:]), expected)
    other.snapshot = state
    assert other.exact
    assert same(play(other, actions[50:]), expected)


def test_snapshot_of_atari_gives_the_same_last_frames_wherever_in_a_decision_an_episode_ends():
    config = Config(env="BreakoutNoFrameskip-v4", frame_size=42)
    straight, other = (SnapshotWrapper(make_env(config, find_spec(config.env), seed)) for seed in (0, 1))
    other.reset(seed=1)
    random, frames = np.random.default_rng(0), []
    for seed in range(8):
        straight.reset(seed=seed)
        terminated = False
        while not terminated:
            snapshot, action = straight.snapshot, int(random.integers(4))
            before = straight.unwrapped.ale.getEpisodeFrameNumber()
            expected = straight.step(action)
            terminated = expected[2]
        frames.append(straight.unwrapped.ale.getEpisodeFrameNumber() - before)
        other.snapshot = to_arrays(to_tensors(snapshot))
        assert same(other.step(action), expected) and same(other.reset()[0], straight.reset()[0])
    assert min(frames) < 4  # where the last picture is the one before


def test_snapshot_of_atari_is_small():
    atari = SnapshotWrapper(make_env(Config(), find_spec("PongNoFrameskip-v4"), 0))
    atari.reset(seed=0)
    for _ in range(50):
        atari.step(2)
    file = io.BytesIO()
    torch.save(to_tensors(atari.snapshot), file)
    assert len(file.getvalue()) < 20_000


def test_trainer_starts_new_episodes_where_the_old_ones_are_not_restored_exactly(tmp_path, monkeypatch, capsys):
    flags = ["--preset", "pong-fast", "--backend", "sync", "--num-envs", "2", *SHORT]
    run(tmp_path / "run", flags, [40])
    set_state = AtariGame.set_state
    monkeypatch.setattr(AtariGame, "set_state", lambda self, state: set_state(self, state) and False)
    resumed = opened(parse_config(["--resume", str(tmp_path / "run"), "--stop-after", "80", "--no-progress"]))
    collector = resumed.algorithm.collector
    assert not resumed.episodes_continue and not collector.groups[0].lengths.any()
    assert not collector.next_obs[:, :-1].any() and collector.next_obs[:, -1].any()  # a stack of one frame
    resumed.close()
    assert Trainer(parse_config(["--resume", str(tmp_path / "run"), "--stop-after", "80"])).run().exit_code == 0
    assert "resumed at 40 env_steps; every environment starts a new episode" in capsys.readouterr().out


def test_snapshot_is_not_exact_where_the_emulator_ignores_it(monkeypatch):
    atari = SnapshotWrapper(make_env(Config(), find_spec("PongNoFrameskip-v4"), 0))
    atari.reset(seed=0)

    other = SnapshotWrapper(make_env(Config(), find_spec("PongNoFrameskip-v4"), 1))
    other.reset(seed=1)
    monkeypatch.setattr(ale_py.ALEInterface, "restoreState", lambda self, state: None)
    other.snapshot = atari.snapshot
    assert not other.exact


def test_trainer_resumed_may_change_environment_settings(tmp_path):
    flags = ["--env", "BreakoutNoFrameskip-v4", "--backend", "sync", "--num-envs", "2", "--network", "small", *SHORT]
    run(tmp_path / "run", [*flags, "--frame-size", "42"], [40])
    changes = ["--terminal-on-life-loss", "--max-episode-frames", "200", "--noop-max", "0", "--stop-after", "200"]
    trainer = Trainer(parse_config(["--resume", str(tmp_path / "run"), *changes]))
    assert trainer.run().exit_code == 0
    with open(tmp_path / "run" / "episodes.csv", newline="", encoding="utf-8") as file:
        assert max(int(row["length"]) for row in csv.DictReader(file)) <= 50


class Odd(gym.Env):
    """An environment with state that no snapshot can hold, or that a new one does not have yet."""

    observation_space, action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2)

    def __init__(self, hidden):
        self.hidden = hidden

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.trail = [*getattr(self, "trail", []), int(action)]
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Listed(list):
    pass


Pair, Way = namedtuple("Pair", "a b"), IntEnum("Way", "UP DOWN")
LOST = [
    *(object(), {1, 2}, {(0, 1): 2}, [np.random.default_rng(0)], np.array([object()]), Pair(1, 2), Listed([1])),
    *([deque([1])], {"a": deque([1])}, OrderedDict(a=1), defaultdict(int, a=1), Counter("aab")),
    *(
        np.ones(2, np.longdouble),
        np.longdouble(1),
        np.ma.array([1]),
        Way.UP,
        {Way.UP: 1},
        {np.float64(1): 1},
        partial(int, "3"),
        (len, [object()]),
    ),
]


@pytest.mark.parametrize(
    ("hidden", "exact"),
    [
        *((3, True), ({"a": [1, (2.0, None)]}, True), (deque([1], 2), True), (np.random.default_rng(0), True)),
        *((np.array(["wall", "ice"]), True), (np.array([[b"S\xff"]]), True), (len, True), ((len, Odd), True)),
        *((hidden, False) for hidden in LOST),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],  # without addresses: two workers must find the same tests
)
def test_snapshot_is_not_exact_for_state_that_it_cannot_hold(hidden, exact):
    first, other = SnapshotWrapper(Odd(hidden)), SnapshotWrapper(Odd(copy.deepcopy(hidden)))
    first.step(1)
    other.snapshot = to_arrays(to_tensors(first.snapshot))
    assert (other.exact, other.refusal) == (exact, "")
    assert other.unwrapped.trail == [1]


def test_trainer_resumed_tells_a_limit_of_the_machine_from_a_damaged_checkpoint(tmp_path, monkeypatch):
    flags = [*CASES["frozen lake"], "--backend", "async", "--num-envs", "2"]
    run(tmp_path / "run", flags, [20])

    def refuse(more, rule, instead):
        raise ValueError(f"{rule}: 70 open files are needed, 50 are allowed (ulimit -Hn); use {instead}")

    monkeypatch.setattr("a2c.envs.make.allow_open_files", refuse)
    trainer = Trainer(parse_config(["--resume", str(tmp_path / "run"), "--no-progress"]))
    with pytest.raises(ValueError, match="num_envs must fit the limit of open files") as refused:
        trainer.run()
    assert not isinstance(refused.value, CheckpointError)


def test_snapshot_restores_arrays_of_strings():
    first, other = (SnapshotWrapper(Odd(np.array(["S", "F"]))) for _ in range(2))
    first.unwrapped.hidden[1] = "H"
    other.snapshot = to_arrays(to_tensors(first.snapshot))
    assert other.exact and other.unwrapped.hidden.tolist() == ["S", "H"]
    other.unwrapped.hidden[0] = "G"  # it can still be written


@pytest.mark.parametrize("late", [{1, 2}, 3, deque([1])])
@pytest.mark.parametrize("where", ["saved", "restored"])
def test_snapshot_is_not_exact_where_one_environment_lacks_an_attribute(where, late):
    first, other = SnapshotWrapper(Odd(0)), SnapshotWrapper(Odd(0))
    (first if where == "saved" else other).unwrapped.late = late
    other.snapshot = to_arrays(to_tensors(first.snapshot))
    assert other.exact == (where == "saved" and late == 3) and not other.refusal

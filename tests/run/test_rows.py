"""episodes.csv has a row per counted episode, whichever process is killed when (A3C and GA3C)."""

import csv
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from a2c.cli import commands as cli
from a2c.cli.flags import parse_config
from a2c.run import state as run_state
from a2c.run.checkpoint import load_checkpoint
from a2c.run.trainer import Trainer

# One batch of all environments: the rollouts of three actors wait in GA3C's queue for the fourth.
FLAGS = ["--preset", "cartpole", "--num-envs", "8", "--target-score", "500", "--no-progress"]
PARTS = {"a3c": ["--workers", "2"], "ga3c": ["--workers", "4", "--num-minibatches", "1"]}


def flags_of(algorithm, run_dir, *more):
    return [*FLAGS, "--algorithm", algorithm, *PARTS[algorithm], "--run-dir", str(run_dir), *more]


def lengths(run_dir, until=None):
    """Lengths of the episodes in episodes.csv, up to `until` env_steps."""
    with open(run_dir / "episodes.csv", newline="", encoding="utf-8") as file:
        return [int(row["length"]) for row in csv.DictReader(file) if until is None or int(row["env_steps"]) <= until]


@pytest.mark.parametrize("algorithm", ["a3c", "ga3c"])
def test_recovery_removes_the_rows_of_episodes_that_are_replayed(algorithm, tmp_path, monkeypatch):
    monkeypatch.setattr(run_state, "SNAPSHOT_EVERY", 1)
    run_dir, draw = tmp_path / "run", random.Random(0)
    more = ["--total-env-steps", "20000", "--max-worker-restarts", "100", "--log-every", "1e-6"]
    more += ["--learning-rate", "1e-6"]  # a policy that does not learn has many episodes, and short ones
    whole = Trainer(parse_config(flags_of(algorithm, run_dir, *more)))
    training_step, kill_at = whole.algorithm.training_step, [3000 * i for i in range(1, 6)]

    def step_and_kill():
        stats = training_step()
        if kill_at and whole.learner.env_steps >= kill_at[0] and draw.random() < 0.3:
            kill_at.pop(0)
            os.kill(draw.choice(whole.algorithm.workers.processes).pid, signal.SIGKILL)
        return stats

    whole.algorithm.training_step = step_and_kill
    assert whole.run().exit_code == 0 and not kill_at
    state = load_checkpoint(run_dir / "latest.pt")
    played = lengths(run_dir)
    assert len(played) == whole.scores.episodes == state["scores"]["episodes"] > 100
    assert sum(played) <= state["env_steps"]  # no decision counts in two rows


@pytest.mark.parametrize("algorithm", ["a3c", "ga3c"])
def test_checkpoint_counts_at_every_moment_the_rows_that_a_resumed_run_keeps(algorithm, tmp_path):
    run_dir, looks = tmp_path / "run", []
    more = ["--total-env-steps", "6000", "--checkpoint-every", "1000"]
    whole = Trainer(parse_config(flags_of(algorithm, run_dir, *more)))
    training_step, log = whole.algorithm.training_step, whole.outputs.log

    def look():
        """What `kill -9` would leave now."""
        state = load_checkpoint(run_dir / "latest.pt")
        looks.append((len(lengths(run_dir, state["env_steps"])), state["scores"]["episodes"]))

    def look_and_step():
        look()
        return training_step()

    def log_and_look(*args, **kwargs):
        log(*args, **kwargs)
        look()

    whole.algorithm.training_step, whole.outputs.log = look_and_step, log_and_look
    assert whole.run().exit_code == 0
    look()
    assert all(rows == episodes for rows, episodes in looks) and looks[-1][1] > 50


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["a3c", "ga3c"])
def test_trainer_that_was_killed_has_a_row_per_counted_episode(algorithm, tmp_path):
    run_dir, before = tmp_path / "run", -1
    where = flags_of(algorithm, run_dir, "--total-env-steps", "100000000", "--checkpoint-every", "1")
    for _ in range(2):
        run = subprocess.Popen([sys.executable, "-m", "a2c", "train", *where], stdout=subprocess.DEVNULL)
        end, seen = time.monotonic() + 60, 0
        while seen < 1_500 + max(before, 0) and time.monotonic() < end:
            time.sleep(0.1)
            seen = load_checkpoint(run_dir / "latest.pt")["env_steps"] if (run_dir / "latest.pt").exists() else 0
        run.send_signal(signal.SIGKILL)
        run.wait()
        state = load_checkpoint(run_dir / "latest.pt")
        assert state["env_steps"] > before
        before, where = state["env_steps"], ["--resume", str(run_dir)]
    assert cli.train([*where, "--stop-after", str(before + 2000), "--no-progress"]) == 0
    state = load_checkpoint(run_dir / "latest.pt")
    assert len(lengths(run_dir)) == state["scores"]["episodes"] > 50 and sum(lengths(run_dir)) <= state["env_steps"]

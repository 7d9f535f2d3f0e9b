"""A worker that dies, hangs or raises: the run goes back to its snapshot and ends as if nothing had happened."""

import os
import signal

import gymnasium as gym
import pytest
from test_resume import lived, same

from a2c import cli, trainer
from a2c.checkpoint import load_checkpoint
from a2c.cli import parse_config
from a2c.config import Config
from a2c.games import WorkerError
from a2c.trainer import Trainer

FLAGS = ["--num-envs", "16", "--threads", "2", "--log-every", "1e-6", "--no-progress", "--env-timeout", "2"]
PONG = ["--preset", "pong-fast", "--backend", "async", *FLAGS, "--total-env-steps", str(16 * 20 * 8)]


def play(run_dir, flags, disturb=None):
    """A run whose `disturb(trainer)` is called behind its fifth rollout; its last checkpoint."""
    run = Trainer(parse_config([*flags, "--run-dir", str(run_dir)]))
    advance, calls = run.advance, []

    def advance_and_disturb():
        rollout = advance()
        calls.append(1)
        if len(calls) == 5 and disturb:
            disturb(run)
        return rollout

    run.advance = advance_and_disturb
    assert run.run() == 0
    return load_checkpoint(run_dir / "latest.pt")


def worker(run, group, row):
    return run.groups[group].env.processes[row].pid


DISTURBANCES = {
    "kill": lambda run: os.kill(worker(run, 1, 3), signal.SIGKILL),
    "kill all": lambda run: [os.kill(p.pid, signal.SIGKILL) for envs in run.groups for p in envs.env.processes],
    "stop": lambda run: os.kill(worker(run, 0, 0), signal.SIGSTOP),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    return run_dir, play(run_dir, PONG)


@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES.keys())
def test_a_disturbed_run_equals_an_undisturbed_one_bit_for_bit(disturb, undisturbed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trainer, "SNAPSHOT_EVERY", 3)
    state = play(tmp_path / "run", PONG, disturb)
    assert "started again at 960 env_steps, the same games go on (try 1 of 3)" in capsys.readouterr().out
    for part in ("network", "optimizer", "collector", "scores", "updates", "saved_best"):
        assert same(undisturbed[1][part], state[part]), part
    for name in ("metrics.csv", "episodes.csv"):
        assert lived(tmp_path / "run", name) == lived(undisturbed[0], name)


def test_an_environment_that_always_raises_ends_the_run_with_its_traceback(tmp_path, capsys):
    flags = troubled(tmp_path, "raise")
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run"), "--max-worker-restarts", "2"]) == 1
    out, err = capsys.readouterr()
    assert out.count("started again at 0 env_steps") == 2
    *trace, last = err.strip().splitlines()
    assert last == "error: an environment failed: ValueError: the pole broke (3 times without progress)"
    assert trace[0].startswith("Traceback") and any('raise ValueError("the pole broke")' in line for line in trace)


@pytest.mark.parametrize("trouble", ["raise once", "hang once"])
def test_trouble_that_passes_is_overcome(trouble, tmp_path, capsys):
    flags = troubled(tmp_path, trouble)
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert out.count("started again at") == 1
    assert ("no answer within 2 seconds" if "hang" in trouble else "ValueError: the pole broke") in out
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] == 16 * 20 * 10


def test_progress_between_failures_starts_the_count_again(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SNAPSHOT_EVERY", 1)
    run = Trainer(parse_config([*PONG, "--max-worker-restarts", "1", "--run-dir", str(tmp_path / "run")]))
    advance, killed = run.advance, set()

    def advance_and_kill():
        steps = run.learner.env_steps
        if steps % 640 == 0 and steps not in killed:
            killed.add(steps)
            os.kill(worker(run, 0, 1), signal.SIGKILL)
        return advance()

    run.advance = advance_and_kill
    assert run.run() == 0 and len(killed) == 4


def test_workers_that_cannot_start_end_the_run(tmp_path, monkeypatch):
    run = Trainer(parse_config([*PONG, "--max-worker-restarts", "2", "--run-dir", str(tmp_path / "run")]))
    advance, start_games, starts = run.advance, run._start_games, []

    def refuse(state):
        starts.append(1)
        raise WorkerError("the process of an environment died")

    def advance_and_kill():
        monkeypatch.setattr(run, "_start_games", refuse)
        os.kill(worker(run, 0, 1), signal.SIGKILL)
        return advance()

    run.advance = advance_and_kill
    assert start_games and not starts
    with pytest.raises(WorkerError, match="3 times without progress"):
        run.run()
    assert len(starts) == 2


def troubled(tmp_path, order):
    """Flags of a run of `TroubledEnv`, and the order that its environments will find."""
    file = tmp_path / "order"
    file.write_text(order)
    name = f"Troubled{abs(hash(str(tmp_path)))}-v0"
    gym.register(name, entry_point="troubled:TroubledEnv", kwargs={"file": str(file)})
    return ["--env", name, "--backend", "async", *FLAGS, "--total-env-steps", str(16 * 20 * 10)]


def test_config_rules_of_healing():
    assert Config().max_worker_restarts == 3 and Config().env_timeout == 60.0
    with pytest.raises(ValueError, match="env_timeout must be above 0"):
        Config(env_timeout=0.0)

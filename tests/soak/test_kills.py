"""Hundreds of kills, after which a run still gives the same bits. Takes minutes: `pytest -m soak -s tests/soak`.

`A2C_SOAK_KILLS` sets the number of kills of each test (200).
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from runs import TRAIN_PY
from toys import same

from a2c.cli.flags import parse_config
from a2c.run import state as run_state
from a2c.run.checkpoint import load_checkpoint
from a2c.run.trainer import Trainer

pytestmark = pytest.mark.soak
KILLS = int(os.environ.get("A2C_SOAK_KILLS", "200"))
FLAGS = ["--preset", "pong-fast", "--backend", "async", "--num-envs", "16", "--threads", "2", "--no-progress"]
ROLLOUT = 16 * 20
PARTS = ("network", "optimizer", "algorithm", "scores", "updates")


def undisturbed(run_dir, env_steps):
    assert (
        Trainer(parse_config([*FLAGS, "--total-env-steps", str(env_steps), "--run-dir", str(run_dir)])).run().exit_code
        == 0
    )
    return load_checkpoint(run_dir / "latest.pt")


def test_trainer_killed_at_random_moments_gives_the_same_bits(tmp_path):
    """Kill -9 a run that saves after every rollout at a random moment, resume it, and so on; then compare."""
    draw, run_dir = random.Random(0), tmp_path / "run"
    total = KILLS * 40 * ROLLOUT  # more than all the kills leave time for
    saves = ["--total-env-steps", str(total), "--checkpoint-every", "1"]
    killed = during_a_save = 0
    state = {"env_steps": 0}
    while killed < KILLS or not state["env_steps"]:  # a busy machine takes longer to start
        begun = (run_dir / "latest.pt").exists()
        where = ["--resume", str(run_dir)] if begun else [*FLAGS, *saves, "--run-dir", str(run_dir)]
        run = subprocess.Popen([sys.executable, str(TRAIN_PY), *where], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert run.stdout.readline().startswith(b"run directory"), run.stderr.read()
        time.sleep(draw.uniform(0.0, 6.0))  # a start takes two to three
        tree = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        killed += 1
        during_a_save += (run_dir / "latest.pt.tmp").exists()
        _, alive = psutil.wait_procs(tree, timeout=5)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], "a worker is still alive"
        if (run_dir / "latest.pt").exists():
            state = load_checkpoint(run_dir / "latest.pt")
    print(f"\n{killed} kills of the trainer, {during_a_save} inside a save, at {state['env_steps']} env_steps")
    straight = tmp_path / "straight"
    flags = [*FLAGS, "--total-env-steps", str(total), "--stop-after", str(state["env_steps"])]
    assert Trainer(parse_config([*flags, "--run-dir", str(straight)])).run().exit_code == 0
    expected = load_checkpoint(straight / "latest.pt")
    for part in PARTS:
        assert same(expected[part], state[part]), part


def test_recovery_from_workers_killed_at_random_moments_gives_the_same_bits(tmp_path, monkeypatch):
    """Kill -9 of random workers of one run at random moments; the end equals an undisturbed run's."""
    monkeypatch.setattr(run_state, "SNAPSHOT_EVERY", 2)
    draw, over, kills = random.Random(1), threading.Event(), []
    env_steps = KILLS * 5 * ROLLOUT
    flags = ["--total-env-steps", str(env_steps), "--max-worker-restarts", "1000"]
    run = Trainer(parse_config([*FLAGS, *flags, "--run-dir", str(tmp_path / "run")]))

    def kill():
        while not over.wait(draw.uniform(0.2, 1.5)):
            workers = [
                p for envs in list(run.algorithm.groups) for p in getattr(envs.env, "processes", []) if p.is_alive()
            ]
            if workers and run.outputs.is_open and len(kills) < KILLS:
                os.kill(draw.choice(workers).pid, signal.SIGKILL)
                kills.append(run.learner.env_steps)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        assert run.run().exit_code == 0
    finally:
        over.set()
        thread.join()
    state, expected = load_checkpoint(tmp_path / "run" / "latest.pt"), undisturbed(tmp_path / "straight", env_steps)
    print(f"\n{len(kills)} kills of workers in {env_steps} env_steps")
    for part in PARTS:
        assert same(expected[part], state[part]), part
    assert len(kills) >= min(KILLS, 20)

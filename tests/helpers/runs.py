"""Short runs that several tests use: how they are configured, started, disturbed and read back."""

import csv
import subprocess
import sys
from pathlib import Path

import a2c
from a2c.config.config import Config
from a2c.metrics.logger import METRICS
from a2c.run.trainer import Trainer

HELPERS = str(Path(__file__).parent)  # where an environment that is named in a flag can be imported from
TRAIN_PY = Path(a2c.__file__).parent.parent / "train.py"
TIMED = {"seconds", "speed", "share_env", "share_act", "share_learn"}  # columns that hold wall time
TINY = ["--env", "CartPole-v1", "--backend", "sync", "--num-envs", "4", "--threads", "1", "--precision", "float32"]
TINY += ["--rollout-steps", "20", "--num-minibatches", "4", "--epochs", "1"]


def tiny(run_dir, **changes):
    settings = {"env": "CartPole-v1", "backend": "sync", "num_envs": 4, "threads": 1, "precision": "float32"}
    settings |= {"rollout_steps": 20, "num_minibatches": 4, "epochs": 1, "total_env_steps": 480}
    return Config(**settings | {"run_dir": run_dir, "progress": False} | changes)


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def started(run_dir, *flags):
    """A run of train.py in a process of its own, with plain lines instead of the display."""
    args = [sys.executable, str(TRAIN_PY), "--preset", "pong-fast", "--num-envs", "4", "--rollout-steps", "20"]
    args += ["--log-every", "0.2", "--run-dir", str(run_dir), *flags]
    return subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=TRAIN_PY.parent, start_new_session=True
    )


def untimed_rows(run_dir, name):
    """Rows of a CSV file without its wall times."""
    with open(run_dir / name, newline="", encoding="utf-8") as file:
        return [{k: v for k, v in row.items() if k not in TIMED} for row in csv.DictReader(file)]


def row_of(env_steps, **changes):
    """A row of metrics with a different number in each column."""
    return {name: float(i) for i, name in enumerate(METRICS)} | {"env_steps": env_steps, "episodes": 3, **changes}


def disturbed(run_dir, disturb, at=2, **changes):
    """A run of 480 decisions with `disturb()` called after its rollout number `at`; the trainer and its exit code."""
    trainer = Trainer(tiny(run_dir, log_every=1e-6, checkpoint_every=80, **changes))
    after_rollout(trainer, lambda rollouts: disturb() if rollouts == at else None)
    return trainer, trainer.run().exit_code


def after_rollout(trainer, act):
    """Call `act(rollouts)` after each training step, with the number of rollouts so far."""
    training_step, rollouts = trainer.algorithm.training_step, []

    def step_and_act():
        stats = training_step()
        rollouts.append(stats.env_steps)
        act(len(rollouts))
        return stats

    trainer.algorithm.training_step = step_and_act


def opened(config):
    """A trainer that has started its environments and opened its files."""
    trainer = Trainer(config)
    trainer.claim()
    trainer.start()
    trainer.outputs.open()
    return trainer

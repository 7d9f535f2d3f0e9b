"""The way from environment to gradient: what runs in every iteration, log and bookkeeping included."""

import sys
import threading
from pathlib import Path

import a2c
from a2c.config.config import Config
from a2c.run.trainer import Trainer

PACKAGE = Path(a2c.__file__).parent
FILES, LINES = 24, 3560  # what a reader has to look at


def test_training_iteration_of_the_default_preset_calls_few_files(tmp_path):
    config = Config(backend="sync", precision="float32", num_envs=16, threads=2, rollout_steps=5, progress=False)
    settings = {"total_env_steps": 6 * 5 * 16, "log_every": 3600.0, "run_dir": tmp_path / "run"}
    run = Trainer(Config(**vars(config) | settings))
    training_step, called, iterations = run.algorithm.training_step, set(), []

    def step():
        iterations.append(set(called))
        called.clear()
        return training_step()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            called.add(frame.f_code.co_filename)

    run.algorithm.training_step = step
    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(note)  # for the compute threads, which do not run yet
    sys.setprofile(note)
    try:
        assert run.run().exit_code == 0
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
    files = sorted(set.intersection(*iterations[1:]))
    lengths = {str(Path(f).relative_to(PACKAGE)): len(Path(f).read_text(encoding="utf-8").splitlines()) for f in files}
    assert {"collector.py", "policy.py", "losses.py", "envs/atari.py", "run/trainer.py"} <= set(lengths)  # all threads
    assert len(lengths) <= FILES and sum(lengths.values()) <= LINES, lengths

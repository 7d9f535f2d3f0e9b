"""Damaged saved episodes: refused in one line, by a process of their own that may crash, before anything starts."""

import json
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from a2c.cli import commands as cli
from a2c.cli.flags import parse_config
from a2c.config.config import Config
from a2c.envs import trial
from a2c.envs.atari import STATE_LIMIT
from a2c.envs.packing import pack, unpack
from a2c.envs.single import find_spec, make_env
from a2c.envs.snapshot import SnapshotWrapper
from a2c.envs.trial import restores_exactly
from a2c.run.checkpoint import load_checkpoint, save_checkpoint
from a2c.run.trainer import Trainer
from a2c.run.values import to_arrays, to_tensors

BREAKOUT = "BreakoutNoFrameskip-v4"
FLAGS = ["--env", BREAKOUT, "--backend", "sync", "--num-envs", "2", "--network", "small", "--frame-size", "42"]
FUZZ = Path(__file__).parents[1] / "helpers" / "atari_fuzz.py"


def game(seed=0, **changes):
    env = SnapshotWrapper(make_env(Config(env=BREAKOUT, **changes), find_spec(BREAKOUT), seed))
    env.reset(seed=seed)
    return env


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of Breakout after 40 decisions, with episodes of 50."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    flags = [*FLAGS, "--max-episode-frames", "200", "--stop-after", "40", "--no-progress", "--run-dir", str(run_dir)]
    assert Trainer(parse_config(flags)).run().exit_code == 0
    return run_dir


WRONG = (None, -1, 2**40, 1.5, "text", [], {}, np.ones(3), pack(bytes(100)), True)


def test_snapshot_refuses_a_wrong_entry_and_never_sets_it():
    env, good = game(), game(1).snapshot
    for name in good[0]:
        for wrong in WRONG:
            if name == "emulator" and wrong is WRONG[-2]:
                continue  # wrong bytes with a valid checksum can crash the process
            env.snapshot = [{**good[0], name: wrong}]
            assert env.refusal and "\n" not in env.refusal and not env.exact, (name, wrong)
            assert env.unwrapped.frames.shape == (4, 84, 84) and env.unwrapped.pooled.shape == (210, 160)
        env.reset()
        env.step(0)


def test_unpack_notices_a_damaged_byte_by_the_checksum():
    packed = pack(game().unwrapped.ale.cloneState(include_rng=True).serialize())
    assert len(unpack(packed, STATE_LIMIT)) > 10_000
    for at in range(0, len(packed["zlib"]), 97):
        damaged = packed["zlib"].copy()
        damaged[at] ^= 0x10
        try:
            content = unpack({**packed, "zlib": damaged}, STATE_LIMIT)
        except ValueError:
            continue
        assert content == unpack(packed, STATE_LIMIT)  # a byte without a meaning


def test_unpack_refuses_more_bytes_than_its_limit():
    content = bytes(STATE_LIMIT + 1)
    with pytest.raises(ValueError, match="checksum"):
        unpack({"zlib": np.frombuffer(zlib.compress(content), np.uint8), "crc32": zlib.crc32(content)}, STATE_LIMIT)


class Deadly:
    """Crashes or blocks the process that unpickles it."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def test_restores_exactly_is_true_for_good_states():
    states = [{"snapshots": [game(seed).snapshot for seed in range(3)]}, None]
    assert restores_exactly(Config(env=BREAKOUT), to_arrays(to_tensors(states)))
    assert restores_exactly(Config(env="CartPole-v1"), states)


@pytest.mark.parametrize(
    ("what", "said"), [(Deadly(os.abort), r"died \(-6\)"), (Deadly(time.sleep, 1e6), "hung"), ([], "ValueError")]
)
def test_restores_exactly_refuses_states_that_crash_or_hang_their_process(what, said, monkeypatch):
    if said == "hung":
        monkeypatch.setattr(trial, "START_TIMEOUT", 0.5)
    with pytest.raises(ValueError, match=said):
        restores_exactly(Config(env=BREAKOUT, env_timeout=0.5 if said == "hung" else 60.0), [{"snapshots": [what]}])


def test_train_refuses_to_resume_damaged_episodes_before_anything_starts(run_dir, capsys):
    state = load_checkpoint(run_dir / "latest.pt")
    content = (run_dir / "latest.pt").read_bytes()
    state["algorithm"]["envs"][0]["snapshots"][1][0]["frames"] = pack(bytes(7))
    del state["format"]
    save_checkpoint(run_dir / "latest.pt", state)
    files = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    assert cli.train(["--resume", str(run_dir), "--stop-after", "80"]) == 2
    assert {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == files
    out, err = capsys.readouterr()
    assert err.startswith("error: checkpoint ") and "environment 1: ValueError: frames must have" in err
    assert err.count("\n") == 1 and "resumed" not in out
    (run_dir / "latest.pt").write_bytes(content)


@pytest.mark.parametrize(
    ("command", "first", "cases"),
    [
        ("train", 0, 8),
        pytest.param("train", 8, 24, marks=pytest.mark.slow),
        pytest.param("evaluate", 100, 28, marks=pytest.mark.slow),
        pytest.param("record", 100, 28, marks=pytest.mark.slow),
    ],
)
def test_commands_work_or_end_in_one_line_with_a_damaged_atari_checkpoint(command, first, cases, run_dir):
    order = [sys.executable, str(FUZZ), command, str(run_dir), str(first), str(first + cases)]
    done = subprocess.run(order, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    for line in done.stdout.splitlines():
        case = json.loads(line)
        assert case["code"] in (0, 1, 2) and case["kept"], case
        one_line = case["err"].startswith("error: ") and case["err"].count("\n") == 1
        assert one_line if case["code"] else not case["err"], case
    assert len(done.stdout.splitlines()) == cases

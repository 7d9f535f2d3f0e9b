"""The command line: what it accepts, and the one line it prints for what it refuses."""

import dataclasses
import importlib.util
import os
import resource
import subprocess
import sys

import psutil
import pytest
import torch
from runs import TRAIN_PY

from a2c.cli import commands as cli
from a2c.config.config import PRESETS, Config
from a2c.run.run_dir import RunLock

REFUSED = [  # arguments, and what the line must say
    (["--nonsense"], ["--nonsense"]),
    (["--num-evns", "3"], ["--num-evns", "did you mean --num-envs"]),
    (["--num-envs", "many"], ["--num-envs", "many"]),
    (["--num-envs"], ["--num-envs"]),
    (["--num-envs", "0"], ["num_envs must be at least 1", "got 0"]),
    (["--gamma", "1.5"], ["gamma", "at most 1", "got 1.5"]),
    (["--gamma", "nan"], ["gamma", "got nan"]),
    (["--learning-rate", "0"], ["learning_rate must be above 0"]),
    (["--seed", "-1"], ["seed must be at least 0", "got -1"]),
    (["--backend", "thread"], ["--backend", "thread", "native"]),
    (["--precision", "fp8"], ["--precision", "fp8", "bfloat16"]),
    (["--preset", "pong-fats"], ["preset", "'pong-fats'", "did you mean pong-fast"]),
    (["--sliding-batch", "32"], ["gae_lambda must be 1 when sliding_batch is set"]),
    (["--env", "PongNoFrameskp-v4"], ["env must be", "'PongNoFrameskp-v4'", "did you mean PongNoFrameskip-v4"]),
    (["--env", "CartPole-v1", "--backend", "native"], ["backend must be async or sync for CartPole-v1"]),
    (["--env", "CartPole-v1", "--network", "atari"], ["network must be mlp", "got atari"]),
    (["--env", "MountainCarContinuous-v0"], ["env must have a discrete action space", "MountainCarContinuous-v0"]),
    (["--env", "CartPole-v1", "--terminal-on-life-loss"], ["terminal_on_life_loss", "CartPole-v1"]),
    (["--env", "CartPole-v1", "--seed", str(2**31 - 1), "--threads", "2", "--num-envs", "16"], ["seed must be"]),
    (["--resume", "no/such/run"], ["resume must be a run directory", "no/such/run"]),
    (["leftover"], ["leftover"]),
]
if importlib.util.find_spec("Box2D") is None:
    REFUSED.append((["--env", "LunarLander-v3"], ["env", "LunarLander-v3", "Box2D"]))


def refusal(capsys, code):
    """The single line on stderr of a command that was refused."""
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(("args", "parts"), REFUSED, ids=lambda value: " ".join(value) if value else "")
def test_a_bad_command_is_refused_in_one_line_before_any_process_starts(args, parts, capsys, tmp_path):
    before = psutil.Process().children(recursive=True)
    small = [*args, "--run-dir", str(tmp_path / "run"), "--total-env-steps", "10"]  # should it be accepted after all
    small += [] if "--num-envs" in args else ["--num-envs", "2"]
    line = refusal(capsys, cli.train(args if args[-1] == "--num-envs" else small))
    assert all(part in line for part in parts), line
    assert psutil.Process().children(recursive=True) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("env", ["FrozenLake-v1", "CliffWalking-v1"])
def test_an_environment_whose_observation_is_one_number_plays_or_is_refused(env, capsys, tmp_path):
    flags = ["--env", env, "--backend", "sync", "--num-envs", "2", "--total-env-steps", "40"]
    code = cli.train([*flags, "--run-dir", str(tmp_path / "run")])
    assert code == 0 or "env must" in refusal(capsys, code)


def test_a_directory_with_files_is_not_trained_into(capsys, tmp_path):
    (tmp_path / "precious").touch()
    line = refusal(capsys, cli.train(["--run-dir", str(tmp_path)]))
    assert "run_dir must be new or empty" in line and f"--resume {tmp_path}" in line
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_resuming_a_run_without_a_checkpoint_is_refused(capsys, tmp_path):
    (tmp_path / "config.json").write_text(Config(env="CartPole-v1").to_json(), encoding="utf-8")
    line = refusal(capsys, cli.train(["--resume", str(tmp_path)]))
    assert "checkpoint" in line and "latest.pt" in line


def test_resuming_a_run_with_a_damaged_config_is_refused(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"env": ', encoding="utf-8")
    assert refusal(capsys, cli.train(["--resume", str(tmp_path)]))


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["evaluate", "no/such/run"], ["checkpoint must be a file", "no/such/run"]),
        (["evaluate"], ["PATH"]),
        (["evaluate", ".", "--episodes", "0"], ["episodes must be at least 1", "got 0"]),
        (["evaluate", ".", "--episodes", "x"], ["--episodes", "'x'"]),
        (["evaluate", ".", "--seed", "-1"], ["seed must be at least 0", "got -1"]),
        (["trian"], ["command must be one of train, evaluate, record, compare", "'trian'", "did you mean train"]),
    ],
)
def test_other_commands_refuse_in_one_line_too(args, parts, capsys):
    line = refusal(capsys, cli.main(args))
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize(("flag", "near"), [("--num-evns", "--num-envs"), ("--lr", "--lr-decay")])
def test_a_hint_is_one_clean_line_whatever_the_terminal_can_draw(flag, near, encoding):
    # The parser frames its errors with the characters that the terminal has.
    done = subprocess.run(
        [sys.executable, str(TRAIN_PY), flag, "3"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: Unrecognized options: {flag}, 3; did you mean {near}")
    assert "---" not in done.stderr and "," not in done.stderr.split("did you mean")[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_that_the_run_uses_the_cpu(capsys, tmp_path):
    flags = ["--env", "CartPole-v1", "--backend", "sync", "--num-envs", "2", "--total-env-steps", "40", "--cuda"]
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run")]) == 0
    assert "torch finds no GPU here, so this run uses the CPU" in capsys.readouterr().out


def test_a_training_that_needs_too_much_memory_ends_in_one_line_and_frees_its_directory(capsys, tmp_path):
    run_dir = tmp_path / "run"
    flags = ["--backend", "sync", "--num-envs", "8", "--frame-size", "192", "--frame-stack", "16", "--network", "small"]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (300 * 2**30, hard))  # the rollout takes 472 GB
    try:
        assert cli.train([*flags, "--rollout-steps", "100000", "--no-progress", "--run-dir", str(run_dir)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    err = capsys.readouterr().err
    assert err.startswith("error: out of memory: take fewer environments") and err.count("\n") == 1, err
    RunLock(run_dir).take()  # free


@pytest.mark.parametrize("command", ["evaluate", "record"])
def test_other_commands_say_in_one_line_that_memory_is_short(command, capsys, monkeypatch):
    module = importlib.import_module("a2c.tools.record_video" if command == "record" else "a2c.tools.evaluate")
    monkeypatch.setattr(module, "load_policy", lambda *_: torch.empty(2**60))
    assert cli.main([command, "."]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: out of memory: take fewer environments") and err.count("\n") == 1, err


def test_main_explains_its_commands(capsys):
    assert cli.main(["--help"]) == 0
    assert cli.main([]) == 2
    assert "train" in (out := capsys.readouterr().out) and "evaluate" in out


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
def test_help_mentions_every_field(name, help_text):
    assert f"--{name.replace('_', '-')}" in help_text


@pytest.fixture(scope="module")
def help_text():
    """What `python train.py --help` prints, from a process of its own."""
    done = subprocess.run([sys.executable, str(TRAIN_PY), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    return done.stdout


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_the_flags_that_are_not_given(preset):
    assert cli.parse_config(["--preset", preset]) == Config.from_preset(preset)
    assert cli.parse_config([f"--preset={preset}", "--seed", "4"]) == dataclasses.replace(
        Config.from_preset(preset), seed=4
    )


def test_a_flag_overrides_the_preset_wherever_it_stands():
    for args in (["--num-envs", "7", "--preset", "pong-fast"], ["--preset", "pong-fast", "--num-envs", "7"]):
        config = cli.parse_config(args)
        assert (config.num_envs, config.backend, config.frame_size) == (7, "native", 42)


def test_resume_starts_from_the_config_of_the_run(tmp_path):
    config = Config(env="CartPole-v1", gamma=0.9, run_dir=tmp_path)
    (tmp_path / "config.json").write_text(config.to_json(), encoding="utf-8")
    resumed = cli.parse_config(["--resume", str(tmp_path), "--total-env-steps", "99"])
    assert (resumed.env, resumed.gamma, resumed.total_env_steps) == ("CartPole-v1", 0.9, 99)
    assert resumed.resume == tmp_path and resumed.run_dir is None

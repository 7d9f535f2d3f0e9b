"""The command line: what it accepts, and the one line that it prints for what it refuses."""

import dataclasses
import importlib.util
import os
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from disks import FULL
from runs import TRAIN_PY

import a2c
from a2c.cli import commands as cli
from a2c.cli.flags import parse_command, parse_config
from a2c.config.config import PRESETS, Config
from a2c.learner import Learner
from a2c.processes.errors import REPORTED_BY, RankError, WorkerError
from a2c.processes.start import module_environ
from a2c.run.checkpoint import load_checkpoint
from a2c.run.run_dir import RunLock

REFUSED = [  # arguments, and what the line must contain
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
    (["--env", "ALE/Png-v5"], ["did you mean ALE/Pong-v5"]),
    (["--env", "braekout"], ["env must be", "'braekout'", "did you mean breakout"]),
    (["--frame-size", "1e-1"], ["--frame-size", "1e-1"]),
    (["--frame-size", "1e99"], ["frame_size must be at least 36 and at most 512"]),
    (["--env", "CartPole-v1", "--backend", "native"], ["backend must be async or sync for CartPole-v1"]),
    (["--env", "CartPole-v1", "--network", "atari"], ["network must be mlp", "got atari"]),
    (["--env", "MountainCarContinuous-v0"], ["env must have a discrete action space", "MountainCarContinuous-v0"]),
    (["--env", "CartPole-v1", "--terminal-on-life-loss"], ["terminal_on_life_loss", "CartPole-v1"]),
    (["--env", "CartPole-v1", "--seed", str(2**31 - 1), "--threads", "2", "--num-envs", "16"], ["seed must be"]),
    (["--resume", "no/such/run"], ["resume must be a run directory", "got 'no/such/run' (No such file or directory)"]),
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
def test_train_refuses_a_bad_flag_in_one_line_before_any_process_starts(args, parts, capsys, tmp_path):
    before = psutil.Process().children(recursive=True)
    small = [*args, "--run-dir", str(tmp_path / "run"), "--total-env-steps", "10"]  # should it be accepted after all
    small += [] if "--num-envs" in args else ["--num-envs", "2"]
    line = refusal(capsys, cli.train(args if args[-1] == "--num-envs" else small))
    assert all(part in line for part in parts), line
    assert psutil.Process().children(recursive=True) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("env", ["FrozenLake-v1", "CliffWalking-v1"])
def test_train_runs_in_an_environment_whose_observation_is_one_number(env, tmp_path):
    flags = ["--env", env, "--backend", "sync", "--num-envs", "2", "--total-env-steps", "40"]
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run")]) == 0


def test_train_refuses_a_directory_with_files(capsys, tmp_path):
    (tmp_path / "precious").touch()
    line = refusal(capsys, cli.train(["--run-dir", str(tmp_path)]))
    assert "run_dir must be new or empty" in line and "--resume" not in line  # there is no run
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_train_refuses_to_resume_a_run_without_a_checkpoint(capsys, tmp_path):
    (tmp_path / "config.json").write_text(Config(env="CartPole-v1").to_json(), encoding="utf-8")
    line = refusal(capsys, cli.train(["--resume", str(tmp_path)]))
    assert "checkpoint" in line and "latest.pt" in line


@pytest.mark.parametrize("text", ['{"env": ', '{"env": "CartPole-v1", "stop_reward": 475.0}', '{"num_envs": null}'])
def test_train_refuses_to_resume_a_run_with_a_config_that_is_damaged_or_of_another_version(text, capsys, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    line = refusal(capsys, cli.train(["--resume", str(tmp_path)]))
    assert f"a2c {a2c.__version__} can read, got '{tmp_path}': damaged, or of another version" in line


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["evaluate", "no/such/run"], ["checkpoint must be a file", "no/such/run"]),
        (["evaluate"], ["PATH"]),
        (["evaluate", __file__, "--checkpoint", "best.pt"], ["checkpoint must be left out where run_dir is a file"]),
        (["evaluate", __file__, "--checkpoint", "latest.pt"], ["checkpoint must be left out where run_dir is a file"]),
        (["record", __file__, "--checkpoint", "latest.pt"], ["checkpoint must be left out where run_dir is a file"]),
        (["evaluate", ".", "--episodes", "0"], ["episodes must be at least 1", "got 0"]),
        (["evaluate", ".", "--episodes", "x"], ["--episodes", "'x'"]),
        (["evaluate", ".", "--seed", "-1"], ["seed must be at least 0", "got -1"]),
        (["evaluate", ".", "--gready"], ["Unrecognized options: --gready", "did you mean --greedy?"]),
        (["record", ".", "leftover"], ["Unrecognized options: leftover"]),
        (["compare", "--preset", "cartpole", "x"], ["comes before the options of train: a2c compare DIR"]),
        (["sweep", "x", "--budgt", "5"], ["Unrecognized options: --budgt; did you mean --budget?"]),
        (["compare", "x", "--jbos", "2", "--preset", "cartpole"], ["--jbos; did you mean --jobs?"]),
        (
            ["train", "--normalize-obs", "false"],
            ["options: false; a switch takes no value: --normalize-obs or --no-normalize-obs"],
        ),
        (["train", "--no-progress", "True"], ["options: True; a switch takes no value: --progress or --no-progress"]),
        (["report", ".", "true"], ["Unrecognized options: true"]),
        (["record", ".", "--greedy", "true"], ["options: true; a switch takes no value: --greedy or --no-greedy"]),
        (["train", "--normalize_obs=false"], ["a switch takes no value: --normalize-obs or --no-normalize-obs"]),
        (["train", "--seed", "3", "true"], ["takes no value: --crop or --no-crop, for example"]),
        (["evaluate", ".", "--seed", "2000000001"], ["seed must be at least 0 and at most 2000000000"]),
        (["plot", ".", "--out", f"{Path(__file__).parent}"], ["out must be a file, got the directory"]),
        (["record", ".", "--out", f"{Path(__file__).parent}"], ["out must be a file, got the directory"]),
        (["train", "--env", "mine:X-v0"], ["env must be", "module:id is not supported"]),
        (["train", "--env", "custom/maze-v0"], ["env must be", "it was made by env_fn"]),
        (["train", "--preset", "pong-fats"], ["preset must be one of", "did you mean pong-fast or pong-sticky?"]),
        (["train", "--gamma", "2"], ["error: gamma must be at least 0.0 and at most 1.0, got 2.0"]),
        (["train", "--num-evns", "3"], ["Unrecognized options: --num-evns, 3; did you mean --num-envs?"]),
        (["trian"], ["command must be one of compare, ", "'trian'", "did you mean train"]),
        ([], ["command must be one of train, ", "a2c --help explains them"]),
        (["train", "--run-dir", ""], ["an argument must not be empty, got ''"]),
        (["compare", "", "--preset", "cartpole"], ["an argument must not be empty, got ''"]),
        (["train", "--run-dir="], ["--run-dir must not be empty, got ''"]),
        (["train", "--total-env-steps", "1,000"], ["--total-env-steps must be an integer, got '1,000'"]),
        (["train", "--gamma", "0,95"], ["--gamma must be a number, got '0,95'"]),
        (["train", "--target-score=abc"], ["--target-score must be a number, got 'abc'"]),
        (["--seed", "3", "train"], ["command must be one of", "got '--seed'"]),
    ],
)
def test_main_refuses_in_one_line(args, parts, capsys):
    line = refusal(capsys, cli.main(args))
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("encoding", "flag", "near"), [("ascii", "--num-evns", "--num-envs"), ("utf-8", "--lr-fin", "--lr-final")]
)
def test_train_names_the_nearest_flag_whatever_the_terminal_can_draw(encoding, flag, near):
    # tyro frames its errors with the characters that the terminal has.
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


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_ended_is_no_error(unbuffered):
    code = f"{sys.executable} -m a2c evaluate --help | true; exit ${{PIPESTATUS[0]}}"
    environ = {**module_environ(), "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("args", [["--version"], ["--help"]])
def test_output_on_a_full_disk_is_an_error_in_one_line(args):
    with open(FULL, "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "a2c", *args], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("error", "waits", "code"),
    [
        (ValueError("bad value"), True, 2),
        (FloatingPointError("a NaN"), True, 1),
        (WorkerError("an environment failed"), True, 1),
        (OSError("no space left"), True, 1),
        (MemoryError("no memory"), True, 1),
        (RuntimeError("a mistake in the code"), True, 1),
        (KeyError("a mistake in the code"), True, 1),
        (RankError("rank 3 has ended"), False, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rank_that_reports_nothing_leaves_after_the_one_that_does(error, waits, code, capsys, monkeypatch):
    # torchrun ends every rank as soon as one has left, so the rank that prints must be the first.
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    slept: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", slept.append)
    monkeypatch.setattr(cli, "exit_with", lambda code, at_once: code)
    error.add_note(f"{REPORTED_BY} 0")

    def fail(_):
        raise error

    monkeypatch.setitem(cli.RUN, Config, fail)
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == "" and slept == [cli.PATIENCE] * waits


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_train_with_cuda_but_no_gpu_prints_that_it_uses_the_cpu(capsys, tmp_path):
    flags = ["--env", "CartPole-v1", "--backend", "sync", "--num-envs", "2", "--total-env-steps", "40", "--cuda"]
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run")]) == 0
    assert "torch finds no GPU here, so this run uses the CPU" in capsys.readouterr().out


def test_train_without_enough_memory_ends_in_one_line_and_frees_its_directory(capsys, tmp_path):
    run_dir = tmp_path / "run"
    flags = ["--backend", "sync", "--num-envs", "8", "--frame-size", "192", "--frame-stack", "16", "--network", "small"]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (300 * 2**30, hard))  # the rollout takes 472 GB
    try:
        assert cli.train([*flags, "--rollout-steps", "100000", "--no-progress", "--run-dir", str(run_dir)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    err = capsys.readouterr().err
    assert err.startswith("error: out of memory: use fewer environments") and err.count("\n") == 1, err
    RunLock(run_dir).take()  # free


@pytest.mark.parametrize("updates", [0, 100])
@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB."), MemoryError("20 GiB")]
)
def test_train_without_memory_in_an_update_names_the_checkpoint_that_is_kept(
    error, updates, capsys, monkeypatch, tmp_path
):
    step = Learner.take_step

    def take_step(learner, *args):
        if learner.updates >= updates:
            raise error
        return step(learner, *args)

    monkeypatch.setattr(Learner, "take_step", take_step)
    run_dir = tmp_path / "run"
    flags = ["--preset", "cartpole", "--checkpoint-every", "2048", "--no-progress", "--run-dir", str(run_dir)]
    assert cli.train([*flags, "--total-env-steps", "20000"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: out of memory: use fewer environments") and err.count("\n") == 1, err
    assert f"the last checkpoint is kept: {run_dir / 'latest.pt'} (" in err
    assert load_checkpoint(run_dir / "latest.pt")["updates"] == (96 if updates else 0)  # 8 updates per 512 decisions
    monkeypatch.undo()
    assert cli.train(["--resume", str(run_dir), "--total-env-steps", "8192"]) == 0


@pytest.mark.parametrize("command", ["evaluate", "record"])
def test_main_without_enough_memory_ends_in_one_line(command, capsys, monkeypatch):
    module = importlib.import_module("a2c.tools.record_video" if command == "record" else "a2c.tools.evaluate")
    monkeypatch.setattr(module, "load_policy", lambda *_, **__: torch.empty(2**60))
    assert cli.main([command, "."]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: out of memory: use fewer environments") and err.count("\n") == 1, err


def test_main_help_lists_the_commands_and_each_explains_its_options(capsys):
    for args, words in {
        "--help": ["--version", "train", "Train an agent.", "evaluate", "record", "export", "compare"],
        "train --help": ["a2c train", "Learning", "--num-envs 50", "--seed 0", "--help-all"],
        "compare x --help-all": ["a2c compare", "--vary", "--seeds"],
        "train --help-all --preset pong-fast": ["a2c train", "--num-envs", "(default: 12)", "--entropy-hold"],
        "evaluate --help": ["a2c evaluate", "PATH", "--episodes"],
        "record --help": ["a2c record", "PATH", "--out"],
        "export --help": ["a2c export", "PATH", "--half"],
        "compare --help": ["a2c compare", "PATH", "--vary", "--seeds", "--jobs"],
        "sweep --help": ["a2c sweep", "PATH", "--vary", "--jobs", "--budget"],
        "report --help": ["a2c report", "PATH", "--out"],
        "watch --help": ["a2c watch", "PATH", "--port", "--no-open"],
        "plot --help": ["a2c plot", "PATH", "--out", "--metric", "--iqm"],
    }.items():
        with pytest.raises(SystemExit) as end:
            cli.main(args.split())
        out, err = capsys.readouterr()
        assert not end.value.code and not err
        assert all(word in out for word in words), out


def test_main_help_of_train_shows_the_defaults_of_the_preset(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--preset", "cartpole", "--help"])
    out = capsys.readouterr().out
    assert "--env CartPole-v1 " in out and "--entropy-hold" not in out
    assert len(out.splitlines()) <= 42, "one screen"


def test_main_prints_a_shell_completion_for_all_commands(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--tyro-print-completion", "bash"])
    out = capsys.readouterr().out
    assert not end.value.code and "--num-envs" in out and "--episodes" in out


def test_a_run_of_a_comparison_imports_nothing_of_the_working_directory(tmp_path):
    for name in ("json", "random", "a2c"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*cli.TRAIN, "--help"], **pipes, env=module_environ(), cwd=tmp_path) as process:
        assert b"--rollout-steps" in process.stdout.read() and process.wait(60) == 0
        assert process.stderr.read() == b"" and not (tmp_path / "executed").exists()


def test_main_prints_the_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"a2c {a2c.__version__}\n"


def test_main_does_not_import_torch_before_a_command_runs():
    commands = ["--help", "--version", "compare --help", "trian", "train --gamma 2", "train --env pnog"]
    code = "import contextlib, sys\nfrom a2c.cli.commands import main\nfor args in sys.argv[1:]:\n"
    code += "    with contextlib.suppress(SystemExit):\n        main(args.split())\n"
    code += "    if 'torch' in sys.modules:\n        sys.exit(args)"
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_train_names_wsl_on_windows():
    # The libraries first: they would look for the parts of the standard library that only Windows has.
    code = "import sys, gymnasium, matplotlib.pyplot, torch, a2c.cli.commands\nsys.platform = 'win32'\n"
    code += "from a2c import AtariA2C, Collector, a2c_loss, lambda_returns, make_envs, unpack_batch\n"
    code += "sys.exit(a2c.cli.commands.train(['--preset', 'cartpole']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    expected = "error: this part of a2c needs Linux, got Windows; install and use a2c in WSL\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
def test_train_help_mentions_every_field(name, help_text):
    assert f"--{name.replace('_', '-')}" in help_text


@pytest.fixture(scope="module")
def help_text():
    """What `python train.py --help-all` prints, from a process of its own."""
    done = subprocess.run([sys.executable, str(TRAIN_PY), "--help-all"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    return done.stdout


@pytest.mark.parametrize("preset", PRESETS)
def test_parse_config_takes_from_the_preset_what_no_flag_sets(preset):
    assert parse_config(["--preset", preset]) == Config.from_preset(preset)
    assert parse_config([f"--preset={preset}", "--seed", "4"]) == dataclasses.replace(
        Config.from_preset(preset), seed=4
    )


def test_parse_config_lets_a_flag_override_the_preset_in_any_order():
    for args in (["--num-envs", "7", "--preset", "pong-fast"], ["--preset", "pong-fast", "--num-envs", "7"]):
        config = parse_config(args)
        assert (config.num_envs, config.backend, config.frame_size) == (7, "native", 42)


def test_a_path_after_an_equals_sign_may_begin_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    options, _ = parse_command(["record", "~/runs/x", "--out=~/video.gif"])
    assert (options.run_dir, options.out) == (Path("/home/me/runs/x"), Path("/home/me/video.gif"))
    options, _ = parse_command(["plot", "~/a", "b"])
    assert options.runs == (Path("/home/me/a"), Path("b"))


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("pong", "PongNoFrameskip-v4"),
        ("Space-Invaders", "SpaceInvadersNoFrameskip-v4"),
        ("cartpole", "CartPole-v1"),
        ("lunarlander", "LunarLander-v3"),
        ("donkey kong", "ALE/DonkeyKong-v5"),
        ("blackjack", "Blackjack-v1"),
        ("ALE/Pong-v5", "ALE/Pong-v5"),
        ("Pong-v4", "Pong-v4"),
    ],
)
def test_env_may_be_a_short_name(short, full):
    assert parse_config(["--env", short]).env == full == parse_command(["train", f"--env={short}"])[0].env


def test_numbers_may_have_an_exponent_and_the_learning_rate_a_short_flag():
    for args in (["--total-env-steps", "2.5e6", "--lr", "1e-3"], ["--total_env_steps=2500000.0", "--lr=1e-3"]):
        config = parse_config(args)
        assert (config.total_env_steps, config.learning_rate) == (2_500_000, 0.001)
    assert parse_config(["--run-dir", "1e3"]).run_dir == Path("1e3")  # only numbers are changed
    assert parse_command(["evaluate", "1e3", "--checkpoint", "1e3"])[0].checkpoint == "1e3"


def test_parse_config_starts_from_the_config_of_the_run_to_resume(tmp_path):
    config = Config(env="CartPole-v1", gamma=0.9, run_dir=tmp_path)
    (tmp_path / "config.json").write_text(config.to_json(), encoding="utf-8")
    resumed = parse_config(["--resume", str(tmp_path), "--total-env-steps", "99"])
    assert (resumed.env, resumed.gamma, resumed.total_env_steps) == ("CartPole-v1", 0.9, 99)
    assert resumed.resume == tmp_path and resumed.run_dir is None


@pytest.mark.slow
def test_evaluate_prints_a_path_that_its_output_cannot_encode(tmp_path):
    run_dir = tmp_path / "ü"
    assert cli.train(["--preset", "cartpole", "--total-env-steps", "256", "--run-dir", str(run_dir)]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "a2c", "evaluate", str(run_dir), "--episodes", "2"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**module_environ(), "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "") and "\\xfc" in done.stdout

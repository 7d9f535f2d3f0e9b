"""`evaluate` and `record` of runs that cannot be used: one line, the right exit code, no file or process left over."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from runs import HELPERS
from toys import vector

from a2c import Config, Trainer
from a2c.cli import commands as cli
from a2c.cli.flags import parse_config
from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.processes.errors import WorkerError
from a2c.run.checkpoint import CheckpointError
from a2c.tools import evaluate as evaluate_module
from a2c.tools.agent import load
from a2c.tools.evaluate import describe, evaluate, play
from a2c.tools.export import export
from a2c.tools.record_video import record_video

CLEAR = Path("/proc/self/clear_refs")  # Linux only


class Fragile(gym.Env):
    """Two numbers, two actions, 7 decisions; fails in the way that `FAILS` names once a policy has been trained."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = gym.spaces.Box(0.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2)
    FAILS = ""

    def __init__(self, fails="", render_mode=None):
        self.fails, self.render_mode = fails or self.FAILS, render_mode
        if self.fails == "start":
            raise RuntimeError("cannot\nstart")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        if self.fails == "reset":
            raise ValueError("cannot reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.fails == "step":
            raise KeyError("cannot step")
        if Fragile.FAILS == "interrupt":
            Fragile.FAILS, self.stepping = "", True  # once
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.5)
            self.stepping = False
        if self.fails == "die" and multiprocessing.parent_process() is not None:
            os._exit(3)
        obs = np.full(2, np.nan if self.fails == "nan" else 0.5, np.float32)
        return obs, 1.0, self.steps == 7, False, {}

    def render(self):
        return np.zeros((30, 40, 3), np.uint8)

    def close(self):
        if getattr(self, "stepping", False):
            Fragile.FAILS = "closed while stepping"  # which may crash an emulator


class Paying(Fragile):
    """Pays the number of each action."""

    def __init__(self, length):
        super().__init__()
        self.length = length

    def step(self, action):
        self.steps += 1
        return np.full(2, 0.5, np.float32), float(action), self.steps == self.length, False, {}


@pytest.fixture(scope="module", autouse=True)
def registered():
    gym.register("Fragile-v0", entry_point=Fragile)
    yield
    del gym.registry["Fragile-v0"]


@pytest.fixture(scope="module")
def good(tmp_path_factory, registered):
    run_dir = tmp_path_factory.mktemp("policies") / "run"
    settings = {"backend": "sync", "num_envs": 2, "rollout_steps": 5, "total_env_steps": 20, "threads": 1}
    assert Trainer(Config(env="Fragile-v0", run_dir=run_dir, progress=False, **settings)).run().exit_code == 0
    return run_dir


def changed(good, tmp_path, change):
    """A copy of the run's checkpoint, and of its config, after `change(state)`."""
    state = torch.load(good / "latest.pt", weights_only=True)
    change(state)
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    torch.save(state, run_dir / "latest.pt")
    (run_dir / "config.json").write_text(state["config"])
    return run_dir


def put(*path, value):
    """A change: `state[path[0]][path[1]]... = value`."""

    def change(state):
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return change


def configure(**values):
    """A change of the config inside the checkpoint."""
    return lambda state: state.update(config=json.dumps({**json.loads(state["config"]), **values}))


def refused(args, capsys):
    """The exit code and the one line of a command that leaves nothing behind and takes little memory."""
    before, threads, memory = set(threading.enumerate()), torch.get_num_threads(), memory_peak(restart=True)
    code = cli.main([str(arg) for arg in args])
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert set(threading.enumerate()) <= before and not multiprocessing.active_children()
    assert torch.get_num_threads() == threads
    assert memory_peak() - memory < 200_000, "kilobytes"
    return code, error


def memory_peak(restart=False):
    """Most memory (KiB) that this process had at a time, since the last `restart`; 0 where it cannot be told."""
    if not CLEAR.exists():
        return 0
    if restart:
        CLEAR.write_text("5")
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def weight(state):
    return next(name for name in state["network"] if name.endswith("weight"))


def nan_weight(state):
    state["network"][weight(state)][0, 0] = float("nan")


def huge_weight(state):
    state["network"][weight(state)] = torch.zeros(1).expand(10**6, 10**6)


def no_weight(state):
    del state["network"][weight(state)]


def half_weight(state):
    state["network"][weight(state)] = state["network"][weight(state)].half()


class Allocates:
    """800 MB, once it is read."""

    def __reduce__(self):
        return bytearray, (800_000_000,)


def list_of_itself(state):
    state["scores"] = []
    state["scores"].extend([state["scores"]] * 8000)


def doubling_lists(state):
    for _ in range(64):
        state["scores"] = [state["scores"], state["scores"]]


BAD = {
    "observations of another size": (put("input_shape", value=[5]), "input_shape"),
    "huge observations": (put("input_shape", value=[4, 10**6, 10**6]), "input_shape"),
    "observations as text": (put("input_shape", value="2"), "input_shape"),
    "observations as a tensor": (put("input_shape", value=torch.ones(3)), "checkpoint"),
    "another number of actions": (put("n_actions", value=3), "n_actions"),
    "actions as text": (put("n_actions", value="2"), "n_actions"),
    "a million million actions": (put("n_actions", value=10**12), "n_actions"),
    "NaN in a weight": (nan_weight, "NaN or infinite"),
    "a huge weight in a small file": (huge_weight, "larger than the file"),
    "a sparse weight": (put("network", "policy.0.bias", value=torch.ones(64).to_sparse()), "damaged or not"),
    "a missing weight": (no_weight, "another network"),
    "a weight of another kind": (half_weight, "another network"),
    "a text for a weight": (put("network", "policy.0.bias", value="x"), "damaged state"),
    "no network": (put("network", value=None), "bad network, not a dictionary but NoneType"),
    "lists in lists": (doubling_lists, "larger than the file"),
    "a list that holds itself": (list_of_itself, "larger than the file"),
    "a huge array of bytes": (put("scores", value=Allocates()), "got __builtin__ bytearray"),
    "a huge memory": (configure(network="lstm", lstm_units=65_536), "another network"),
    "no memory for a huge memory": (configure(network="lstm", lstm_units=65_537), "lstm_units"),
    "images": (configure(env="PongNoFrameskip-v4", frame_size=512, frame_stack=16), "input_shape"),
    "an unknown environment": (configure(env="Fragil-v0"), "did you mean Fragile-v0"),
    "fewer rewards than none": (put("rewards", value=-1.0), "bad rewards"),
    "rewards that are NaN": (put("rewards", value=math.nan), "bad rewards"),
    "rewards as text": (put("rewards", value="5"), "bad rewards"),
    "a config that is none": (put("config", value="{"), "bad config"),
}


BOTH = ("observations of another size", "NaN in a weight", "images")  # the rest is the same code for `record`


@pytest.mark.parametrize(
    ("command", "case"), [*(("evaluate", case) for case in BAD), *(("record", case) for case in BOTH)]
)
def test_evaluate_and_record_refuse_a_bad_checkpoint_in_one_line(command, case, good, tmp_path, capsys):
    change, part = BAD[case]
    code, error = refused([command, changed(good, tmp_path, change)], capsys)
    assert code == 2 and part in error, error


@pytest.mark.parametrize("case", BAD)
def test_train_command_does_not_resume_a_bad_checkpoint(case, good, tmp_path, capsys):
    run_dir = changed(good, tmp_path, BAD[case][0])
    before = (run_dir / "latest.pt").read_bytes()
    code, _ = refused(["train", "--resume", run_dir, "--stop-after", "40"], capsys)
    assert code == 2 and (run_dir / "latest.pt").read_bytes() == before


def pack(path, method):
    with zipfile.ZipFile(path) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in entries:
            archive.writestr(name, content)


def test_load_checkpoint_refuses_compressed_entries(good, tmp_path, capsys):
    run_dir = changed(good, tmp_path, put("algorithm", "x", value=torch.zeros(10_000_000)))
    pack(run_dir / "latest.pt", zipfile.ZIP_DEFLATED)
    assert (run_dir / "latest.pt").stat().st_size < 1_000_000
    code, error = refused(["evaluate", run_dir], capsys)
    assert code == 2 and "larger than the file" in error


def test_load_checkpoint_notices_a_changed_byte_in_a_weight(good, tmp_path, capsys):
    run_dir = changed(good, tmp_path, lambda state: None)
    path = run_dir / "latest.pt"
    with zipfile.ZipFile(path) as archive:
        entry = max((e for e in archive.infolist() if "/data/" in e.filename), key=lambda e: e.file_size)
    content = bytearray(path.read_bytes())
    content[entry.header_offset + entry.file_size // 2] ^= 1
    path.write_bytes(content)
    code, error = refused(["evaluate", run_dir], capsys)
    assert code == 2 and "damaged" in error


def test_evaluate_refuses_a_part_of_an_episode():
    with pytest.raises(ValueError, match=r"episodes must be at least 1, an integer, got 2\.5"):
        evaluate("runs/none", episodes=2.5)


def test_evaluate_takes_numbers_of_numpy(good):
    scores = evaluate(good, np.int64(3), seed=np.arange(8)[7])
    assert len(scores) == 3 and list(scores) == list(evaluate(good, 3, seed=7))


@pytest.mark.parametrize("threads", [1, 2])
def test_evaluate_uses_as_many_threads_as_it_is_given(threads, good, tmp_path, monkeypatch):
    run_dir, used = changed(good, tmp_path, configure(threads=5)), []
    monkeypatch.setattr("a2c.tools.evaluate.Compute", lambda config: used.append(Compute(config)) or used[0])
    evaluate(run_dir, 2, threads=threads)
    assert used[0].threads == threads


@pytest.mark.parametrize("command", [["evaluate", "--episodes", "2"], ["record", "--out"]])
def test_evaluate_does_not_start_the_threads_of_the_run(command, good, tmp_path, capsys, monkeypatch):
    run_dir, asked = changed(good, tmp_path, configure(threads=1024)), []
    most, start = [0], threading.Thread.start

    def make_compute(config):
        asked.append(config.threads)
        return Compute(config)

    def counted(thread):
        most[0] = max(most[0], threading.active_count() + 1)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    monkeypatch.setattr("a2c.tools.evaluate.Compute", make_compute)
    monkeypatch.setattr("a2c.tools.record_video.Compute", make_compute)
    if command[-1] == "--out":
        command = [*command, str(tmp_path / "episode.gif")]
    assert cli.main([command[0], str(run_dir), *command[1:]]) == 0
    assert most[0] < 64 and asked == [0]


@pytest.mark.parametrize("command", ["evaluate", "record"])
@pytest.mark.parametrize(
    ("fails", "part"),
    [
        ("start", "cannot start"),
        ("reset", "cannot reset"),
        ("step", "cannot step"),
        ("nan", "logits are NaN"),
    ],
)
def test_evaluate_and_record_report_a_failing_environment_in_one_line(command, fails, part, good, capsys, monkeypatch):
    monkeypatch.setattr(Fragile, "FAILS", fails)
    code, error = refused([command, good], capsys)
    assert code == 1 and part in error, error
    assert not list(Path(good).glob("*episode.*"))


@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")  # gymnasium reports an exception before it raises it
@pytest.mark.parametrize(
    ("fails", "part"), [("step", "cannot step"), ("die", "died"), ("reset", "cannot reset"), ("start", "cannot start")]
)
def test_evaluate_ends_all_workers_when_one_fails(fails, part, good, tmp_path, capsys, monkeypatch):
    spec = gym.envs.registration.EnvSpec("Fragile-v0", entry_point=Fragile, kwargs={"fails": fails})
    run_dir = changed(good, tmp_path, configure(backend="async"))
    monkeypatch.setitem(gym.registry, "Fragile-v0", spec)
    code, error = refused(["evaluate", run_dir, "--episodes", "3"], capsys)
    assert code == 1 and part in error, error


def test_evaluate_and_record_video_raise_what_the_commands_print(good, tmp_path, monkeypatch):
    bad = changed(good, tmp_path, nan_weight)
    for call in (evaluate, lambda run: record_video(run, tmp_path / "episode.gif")):
        with pytest.raises(CheckpointError, match="NaN or infinite"):
            call(bad)
    monkeypatch.setattr(Fragile, "FAILS", "step")
    for call in (evaluate, lambda run: record_video(run, tmp_path / "episode.gif")):
        with pytest.raises(WorkerError, match="cannot step"):
            call(good)


def test_trainer_that_refuses_its_checkpoint_ends_its_threads(good, tmp_path):
    run_dir, before = changed(good, tmp_path, nan_weight), set(threading.enumerate())
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        Trainer(parse_config(["--resume", str(run_dir), "--threads", "2"]))
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("command", ["evaluate", "record"])
def test_ctrl_c_closes_no_environment_while_a_thread_steps_it(command, good, capsys, monkeypatch):
    monkeypatch.setattr(Fragile, "FAILS", "interrupt")
    before = set(threading.enumerate())
    assert cli.main([command, str(good)]) == 130
    assert Fragile.FAILS == "" and capsys.readouterr().err == "" and set(threading.enumerate()) <= before


@pytest.mark.slow
def test_ctrl_c_ends_an_evaluation_whose_environment_hangs(good):
    code = "import signal, sys, threading, time, gymnasium as gym, test_evaluate\nfrom a2c.cli.commands import main\n"
    code += "def hang(self, action):\n"
    code += "    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)\n    time.sleep(600)\n"
    code += "test_evaluate.Fragile.step = hang\ngym.register('Fragile-v0', entry_point=test_evaluate.Fragile)\n"
    code += "sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "evaluate", str(good)],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{HELPERS}"},
        timeout=60,
        capture_output=True,
    )
    assert done.returncode == 130, done


def test_json_of_scores_that_are_not_finite_and_of_few_episodes_is_valid(good, capsys, monkeypatch):
    def strange(env, action):
        return np.full(2, 0.5, np.float32), math.nan, True, False, {}

    monkeypatch.setattr(Fragile, "step", strange)
    assert cli.main(["evaluate", str(good), "--episodes", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert summary["scores"] == [None, None] and summary["mean"] is None and summary["interval"] == [None, None]
    monkeypatch.setattr(Fragile, "step", lambda env, action: (np.zeros(2, np.float32), 1.0, True, False, {}))
    assert cli.main(["evaluate", str(good), "--episodes", "4"]) == 0
    assert "mean 1.00, standard deviation 0.00" in capsys.readouterr().out  # no interval


def test_the_best_checkpoint_is_played_unless_another_is_named(good, tmp_path, capsys):
    run_dir = changed(good, tmp_path, put("env_steps", value=20))
    assert play(run_dir, 1).checkpoint == run_dir / "latest.pt"
    state = torch.load(run_dir / "latest.pt", weights_only=True)
    torch.save({**state, "env_steps": 10}, run_dir / "best.pt")
    assert (play(run_dir, 1).checkpoint, play(run_dir, 1).env_steps) == (run_dir / "best.pt", 10)
    assert play(run_dir, 1, checkpoint="latest.pt").env_steps == 20
    assert play(run_dir / "latest.pt", 1).env_steps == 20
    with pytest.raises(CheckpointError, match=r"got \S+/bset\.pt: the directory has no such file"):
        play(run_dir / "bset.pt", 1)
    assert export(run_dir, tmp_path / "policy.pt").env_steps == 10
    (run_dir / "latest.pt").unlink()
    assert load(run_dir).act(np.zeros(2, np.float32)) in (0, 1)
    assert cli.main(["evaluate", str(run_dir), "--episodes", "1"]) == 0
    assert f"{run_dir / 'best.pt'}, after 10 decisions" in capsys.readouterr().out


def prefer_second_action(state):
    weight, bias = [tensor for name, tensor in state["network"].items() if name.startswith("policy")][-2:]
    weight.zero_()
    bias.copy_(torch.tensor([0.0, 1.0]))


def test_evaluate_plays_as_many_episodes_in_every_environment_greedily_or_not(good, tmp_path, monkeypatch):
    run_dir, lengths = changed(good, tmp_path, prefer_second_action), [1] * 5 + [9] * 5
    monkeypatch.setattr("a2c.tools.evaluate.make_envs", lambda config: vector(*map(Paying, lengths)))
    greedy, sampled = (play(run_dir, 12, greedy=greedy).episodes for greedy in (True, False))
    for episodes in (greedy, sampled):  # short ones have no advantage
        assert np.bincount([episode.env for episode in episodes]).tolist() == [2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    assert all(episode.score == episode.length for episode in greedy)
    assert 0 < sum(episode.score for episode in sampled) < sum(episode.length for episode in sampled)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_evaluate_acts_in_the_precision_of_the_run(precision, good, tmp_path, monkeypatch):
    run_dir, seen = changed(good, tmp_path, configure(precision=precision)), []

    def spy(groups, net, *rest):
        seen.append(next(net.parameters()).dtype)
        return Collector(groups, net, *rest)

    monkeypatch.setattr("a2c.tools.evaluate.Collector", spy)
    evaluate(run_dir, 1)
    assert seen == [getattr(torch, precision)]


def test_evaluate_says_that_there_is_no_gpu(good, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["evaluate", str(good), "--episodes", "1", "--cuda", "--json"]) == 0
    shown = capsys.readouterr()
    assert (
        shown.err == "--cuda: torch finds no GPU here, so the CPU is used\n" and json.loads(shown.out)["episodes"] == 1
    )


def test_evaluate_prints_protocol_and_results(good, capfd, monkeypatch):
    rewards = iter(range(1, 1000))
    monkeypatch.setattr(Fragile, "step", lambda env, action: (np.zeros(2, np.float32), next(rewards), True, False, {}))
    assert cli.main(["evaluate", str(good), "--episodes", "6", "--seed", "3", "--greedy"]) == 0
    shown = capfd.readouterr()
    assert shown.err == ""  # the bar is for terminals
    assert shown.out.splitlines() == [
        f"policy    {good / 'latest.pt'}, after 20 decisions",
        "protocol  6 episodes of Fragile-v0, seed 3",
        "          greedy actions",
        "score     mean 3.50 (95 % interval 1.54 to 5.46), standard deviation 1.71",
        "          median 3.5, min 1, max 6",
        "length    mean 1.0 decisions",
    ]


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_on_a_terminal_evaluate_shows_a_bar_on_stderr_alone(json_flag, good, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes a stream for a terminal then
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(["evaluate", str(good), "--episodes", "3", *json_flag]) == 0
    shown = capsys.readouterr()
    assert "3/3" in shown.err and "mean 7.0" in shown.err and "21 decisions" in shown.err
    assert "episodes, mean" not in shown.out and (not json_flag or json.loads(shown.out)["episodes"] == 3)


def test_an_atari_game_is_compared_with_a_human_where_the_table_has_it(tmp_path, monkeypatch):
    settings = {"backend": "sync", "num_envs": 1, "rollout_steps": 4, "total_env_steps": 4, "max_episode_frames": 40}
    settings |= {"progress": False, "precision": "float32", "noop_max": 0, "threads": 1}
    for env, figures in (("PongNoFrameskip-v4", (-20.7, 14.6)), ("ALE/Othello-v5", (None, None))):
        run_dir = tmp_path / env[:3]
        assert Trainer(Config.from_preset("pong-fast", **settings, env=env, run_dir=run_dir)).run().exit_code == 0
        evaluation = play(run_dir, 2)
        cut_off = evaluation.summary()  # no figures are those of episodes of 10 decisions
        assert cut_off["human_normalized"] is None and "cut off after 40 frames" in "\n".join(describe(cut_off))
        with monkeypatch.context() as patch:
            patch.setattr(evaluate_module, "FULL_LENGTH", 40)
            summary = evaluation.summary()
            lines = "\n".join(describe(summary))
        assert (summary["random_score"], summary["human_score"]) == figures and "cut off" not in lines
        if figures[0] is None:
            assert summary["human_normalized"] is None and "human" not in lines
            assert "sampled actions, sticky actions 0.25, no no-ops" in lines
        else:
            assert summary["human_normalized"] == pytest.approx((summary["mean"] + 20.7) / 35.3)
            assert "no sticky actions" in lines and "(0 % is a random player, -20.7; 100 % a human, 14.6)" in lines


class Payer(gym.Env):
    """Pays the number of each action for 50 decisions; no seed changes anything else."""

    observation_space, action_space = gym.spaces.Box(0.0, 1.0, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), float(action), self.steps == 50, False, {}


def test_evaluate_samples_actions_by_its_seed(tmp_path):
    settings = {"backend": "sync", "num_envs": 2, "rollout_steps": 5, "total_env_steps": 10, "threads": 1}
    assert Trainer(Config(run_dir=tmp_path / "run", progress=False, **settings), env_fn=Payer).run().exit_code == 0
    scores = [evaluate(tmp_path / "run", 5, seed=seed, env_fn=Payer).tolist() for seed in (1, 1, 2)]
    assert scores[0] == scores[1] != scores[2]


def test_evaluate_plays_by_the_rules_of_the_run_but_for_lost_lives(tmp_path, monkeypatch):
    rules = {"max_episode_frames": 40, "noop_max": 7, "sticky_actions": 0.5}
    settings = {"backend": "sync", "num_envs": 1, "rollout_steps": 2, "total_env_steps": 2, "threads": 1, **rules}
    settings |= {"env": "BreakoutNoFrameskip-v4", "terminal_on_life_loss": True, "progress": False}
    assert Trainer(Config.from_preset("pong-fast", run_dir=tmp_path / "run", **settings)).run().exit_code == 0
    made, make = [], evaluate_module.make_envs
    monkeypatch.setattr(evaluate_module, "make_envs", lambda config: made.append(config) or make(config))
    assert [episode.length for episode in play(tmp_path / "run", 2).episodes] == [10, 10]
    assert {name: getattr(made[0], name) for name in rules} == rules and not made[0].terminal_on_life_loss

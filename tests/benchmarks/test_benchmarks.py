"""The benchmarks count real decisions, compute what they print, and name the machine and commit."""

import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import compare_sb3
import gpu
import pytest
import torch
from compare_sb3 import Options, compare, contenders_of, ratios
from throughput import SINGLE, make_stages

from a2c.config.config import Config
from a2c.run.trainer import Trainer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--preset", "a2c-strict", "--env", "CartPole-v1", "--backend", "sync", "--num-envs", "4", "--threads", "1"]
PLACE = {"processor", "instructions", "cores", "python", "torch", "gymnasium", "commit"}


def test_throughput_counts_the_decisions_of_every_stage(tmp_path):
    config = Config(
        env="CartPole-v1", backend="sync", num_envs=16, threads=2, rollout_steps=7, run_dir=tmp_path / "run"
    )
    with ExitStack() as stack:
        training = Trainer(config)
        stack.callback(training.close)
        training.start()
        stages = make_stages(training, stack)

        def played():
            return training.learner.env_steps

        before = played()
        assert stages["end to end"]() == played() - before == 7 * 16
        for name in ("learning", "learning" + SINGLE):
            learner = stages[name].args[0].learner
            before = learner.env_steps
            assert stages[name]() == learner.env_steps - before == 3 * 7 * 16  # three rollouts: 20 steps at least
        for name in ("acting", "acting" + SINGLE):
            rows, trainer = [], stages[name].args[0]
            hook = trainer.learner.replica.register_forward_hook(
                lambda _, obs, out, rows=rows: rows.append(len(obs[0]))
            )
            assert stages[name]() == 3 * 7 * 16
            hook.remove()
            assert sum(rows) == (3 * 7 + 3) * 16  # and, as the collector did, the bootstrap of each rollout
        for name in ("environments", "environments" + SINGLE):
            steps, groups = [], stages[name].args[0]
            for envs in groups:
                step = envs.step
                envs.step = lambda actions, step=step, steps=steps: (steps.append(len(actions)), step(actions))[1]
            assert stages[name]() == sum(steps) == 20 * sum(envs.num_envs for envs in groups)


def test_throughput_writes_what_follows_from_its_windows(tmp_path, precision="bfloat16"):
    command = [sys.executable, str(BENCHMARKS / "throughput.py"), "--seconds", "0.05", "--rounds", "3", *TINY]
    command += ["--precision", precision, "--json", str(tmp_path / "out.json")]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert all(len(speeds) == 3 and min(speeds) > 0 for speeds in figures["windows"].values())
    median = {name: statistics.median(speeds) for name, speeds in figures["windows"].items()}
    assert figures["median"] == median
    alone = sum(1 / median[f"{part}, 1 thread"] for part in ("environments", "acting", "learning"))
    assert figures["core_bound"] == pytest.approx(figures["machine"]["cores"] / alone)
    assert figures["share_of_core_bound"] == pytest.approx(median["end to end"] / figures["core_bound"])
    assert figures["machine"]["precision"] == precision and precision in figures["title"]
    assert set(figures["machine"]) >= PLACE


@pytest.mark.slow
def test_contender_of_ours_counts_whole_rollouts(tmp_path, precision="float32"):
    spec = {"kind": "ours", "args": [*TINY, "--precision", precision, "--run-dir", str(tmp_path / "run")]}
    order = json.dumps({"seconds": 0.05, "threads": 0}) + "\n"
    command = [sys.executable, str(BENCHMARKS / "contender.py"), json.dumps(spec)]
    done = subprocess.run(command, input=2 * order, check=True, timeout=120, capture_output=True, text=True)
    started, *windows = map(json.loads, done.stdout.splitlines())
    assert f"4 envs, MlpA2C, {precision}, batch 20" in started["note"] and started["precision"] == precision
    for window in windows:
        assert window["steps"] > 0 and window["steps"] % (4 * 20) == 0 and window["seconds"] >= 0.05


def test_compare_sb3_writes_what_follows_from_its_windows(capsys):
    options = Options(ours="sync", sb3_envs="", seconds=0.05, rounds=2)
    figures = compare(options, [*TINY, "--precision", "float32"])
    row = figures["contenders"]["ours sync"]
    assert len(row["speeds"]) == 2 and row["median"] == statistics.median(row["speeds"])
    assert row["precision"] == "float32" and set(figures["machine"]) >= PLACE and figures["ratios"] == {}


def test_compare_sb3_measures_start_and_memory_of_each_contender_alone(monkeypatch):
    alive, measured = [], []

    class FakeContender(SimpleNamespace):
        def __init__(self, name, spec):
            super().__init__(name=name, process=SimpleNamespace(pid=name))
            alive.append(self)

        def reply(self, timeout):
            return {"note": "", "start": float(len(alive))}

        def train(self, request):
            return {"steps": 100 * len(alive), "seconds": 1.0, "threads": 1}

        def kill(self):
            alive.remove(self)

    def memory(pid):
        measured.append((pid, len(alive)))
        return 7.0, 9.0

    monkeypatch.setattr(compare_sb3, "Contender", FakeContender)
    monkeypatch.setattr(compare_sb3, "tree_memory", memory)
    rows = compare(Options(ours="native,async", sb3_envs="50", sb3_threads="default,1"), [])["contenders"]
    assert measured == [("ours native", 1), ("ours async", 1), ("SB3 50 envs", 1)] and not alive
    assert len(rows) == 4 and all(row["speeds"] == [300.0] * 3 for row in rows.values())  # beside the others
    assert {(row["start"], row["pss_mb"], row["rss_mb"]) for row in rows.values()} == {(1.0, 7.0, 9.0)}


def test_sb3_has_variants_with_other_numbers_of_environments_and_copied_workers():
    specs = contenders_of(Options(ours="", sb3_envs="16,50 fork"), [])
    found = {name: (spec["num_envs"], spec["start_method"]) for name, spec in specs.items()}
    assert found == {"SB3 16 envs": (16, None), "SB3 50 envs, fork": (50, "fork")}
    with pytest.raises(ValueError, match="sb3_envs must be comma-separated counts"):
        contenders_of(Options(sb3_envs="50 spoon"), [])


def test_ratios_are_of_medians_and_to_the_fastest_of_the_others():
    medians = {"ours async": 900.0, "ours native": 1200.0, "SB3 16 envs, 1": 700.0, "SB3 50 envs, 1": 500.0}
    medians["SB3 50 envs, 2"] = 600.0
    found = ratios({name: {"median": median} for name, median in medians.items()})
    assert found == {
        "ours async / SB3 16 envs, 1": 900 / 700,
        "ours native / SB3 16 envs, 1": 1200 / 700,
        "ours async / SB3 50 envs, 2": 1.5,
    }


def test_gpu_writes_what_follows_from_its_windows_on_the_cpu_too(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--seconds", "0.05", "--rounds", "3", *TINY]
    command += ["--shuffle", "--target", "--target-score", "12", "--total-env-steps", "12000"]
    command += ["--precision", "float32", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    figures = json.loads((tmp_path / "out.json").read_text())
    median = {name: statistics.median(speeds) for name, speeds in figures["windows"].items()}
    assert all(len(speeds) == 3 and min(speeds) > 0 for speeds in figures["windows"].values())
    assert set(median) == {"environments", "end to end"} and figures["median"] == median
    assert figures["share_of_environments"] == pytest.approx(median["end to end"] / median["environments"])
    assert figures["to_target"]["reached"] and 0 < figures["to_target"]["env_steps"] <= 12000
    assert f"{median['end to end']:,.0f} decisions/s" in done.stdout and "a mean score of 12" in done.stdout
    assert set(figures["machine"]) >= PLACE - {"precision"} and figures["cuda_graphs"] == torch.cuda.is_available()


def test_gpu_refuses_an_algorithm_whose_environments_run_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--algorithm", "ga3c"])
    assert gpu.main() == 2 and "algorithm must be a2c" in capsys.readouterr().err

"""The benchmarks start, measure and write; what they say of speed is not tested."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TINY = ["--env", "CartPole-v1", "--backend", "sync", "--num-envs", "4", "--threads", "1"]


def test_throughput_measures_every_stage(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "throughput.py"), "--seconds", "0.05", "--rounds", "1", *TINY]
    subprocess.run([*command, "--json", str(tmp_path / "out.json")], check=True, timeout=120, capture_output=True)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["median"]["end to end"] > 0 and figures["core_bound"] > 0


def test_a_contender_of_ours_runs_a_window(tmp_path):
    spec = {"kind": "ours", "args": [*TINY, "--run-dir", str(tmp_path / "run")]}
    order = json.dumps({"seconds": 0.05, "threads": 0}) + "\n"
    command = [sys.executable, str(BENCHMARKS / "contender.py"), json.dumps(spec)]
    done = subprocess.run(command, input=order, check=True, timeout=120, capture_output=True, text=True)
    started, window = map(json.loads, done.stdout.splitlines())
    assert "4 envs, MlpA2C" in started["note"] and window["steps"] > 0

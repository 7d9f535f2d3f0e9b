"""Training speed against Stable-Baselines3's A2C on the same game and machine.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/compare_sb3.py --ours native,async --network nature

Every contender has a process of its own. All are started and warmed up; then each trains for one
window while the others wait on their pipes: A, B, C, A, B, C, ... Speeds are decisions per
second (env_steps/s) over whole rollouts with their updates.

* ours: training with `--preset a2c-strict`, which learns from each rollout once as SB3 does, without log, checkpoint
  and display
* SB3: `A2C("CnnPolicy")` with its defaults (n_steps=5, RMSprop, float32) on `make_atari_env` with
  `SubprocVecEnv` and `VecFrameStack(4)`. Variants with different numbers of torch threads share a process
  and its environments. Workers are started as `SubprocVecEnv` does without being told, by a fork server; in variants
  named `fork` they are copies of the process that learns. The best variant is the reference. Both run under the
  caller's OpenMP settings (`OMP_WAIT_POLICY`), which make no difference to ours.
* start: imports, environments, network, the first rollout and its update
* PSS: memory of the contender with its workers, shared pages counted once, after it has trained for 5 s

For these two, each is started a second time, alone: processes that run beside it would share its library pages.

The two do not compute the same: SB3 learns once per 5 decisions of every environment, with one
hidden layer for both heads (our `--network nature`); ours uses bfloat16 where the processor has
it (`--precision float32` turns it off) and its own batch size. The table states both.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import statistics
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import check_windows, make_console, run_benchmark, tree_memory
from rich.table import Table

from a2c.cli.flags import parse_config
from a2c.run.about import machine_facts

START_TIMEOUT = 900.0  # seconds: 50 workers that each import torch need most of a minute on two idle cores
WARM_UP = 5.0  # seconds, at most
HELP = "Training speed against Stable-Baselines3. Every flag of train.py works too, for ours: --network nature ..."


@dataclass(frozen=True)
class Options:
    """Flags of the comparison; all others are those of train.py."""

    ours: str = "native,async"
    """Backends of ours to compare (comma-separated)."""
    sb3_envs: str = "16,50,50 fork"
    """Environments of the SB3 contenders (comma-separated counts, each alone or with `fork`)."""
    sb3_threads: str = "default,1"
    """torch threads to try in each SB3 contender (comma-separated counts; default = torch's own choice)."""
    seconds: float = 20.0
    """Length of one window (seconds)."""
    rounds: int = 3
    """Windows of each contender (count)."""
    json: Path | None = None
    """Write every figure to this file (path)."""


class Contender:
    """A contender's process. Its methods raise RuntimeError if it fails or does not reply in time."""

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        self.name = name
        command = [sys.executable, str(Path(__file__).with_name("contender.py")), json.dumps(spec)]
        # Its own session, so that `kill` reaches all its workers; unbuffered, so that `select` sees every line.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )

    def train(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one window and return the reply."""
        self.process.stdin.write((json.dumps(request) + "\n").encode())
        return self.reply(10 * request["seconds"] + 120.0)

    def reply(self, timeout: float) -> dict[str, Any]:
        """The next reply, which must come within `timeout` seconds."""
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        if not ready:
            raise RuntimeError(f"{self.name} did not reply within {timeout:.0f} s")
        line = self.process.stdout.readline()
        message = json.loads(line) if line else {"error": "its process ended; see its messages above"}
        if "error" in message:
            raise RuntimeError(f"{self.name} failed: {message['error']}")
        return message

    def kill(self) -> None:
        """End the process and all its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def compare(options: Options, rest: list[str]) -> dict[str, Any]:
    """All figures of one comparison."""
    check_windows(options.seconds, options.rounds)
    specs, threads = contenders_of(options, rest), counts("sb3_threads", options.sb3_threads)
    warm_up = min(options.seconds, WARM_UP)
    running: dict[str, Contender] = {}
    rows: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        for name, spec in specs.items():
            message(f"starting {name}")
            running[name] = Contender(name, spec)
            stack.callback(running[name].kill)
            facts = running[name].reply(START_TIMEOUT)
            for n in threads if spec["kind"] == "sb3" else [0]:
                label = f"{name}, {n or 'default'} torch threads" if spec["kind"] == "sb3" else name
                rows[label] = {"contender": name, "torch_threads": n, **facts, "speeds": []}
        for turn in range(options.rounds + 1):  # round 0 warms up
            message(f"round {turn} of {options.rounds}" if turn else "warming up")
            for row in rows.values():
                seconds = options.seconds if turn else warm_up
                done = running[row["contender"]].train({"seconds": seconds, "threads": row["torch_threads"]})
                row["threads"] = done["threads"]
                row["speeds"] += [done["steps"] / done["seconds"]] if turn else []
    alone = {name: start_alone(name, spec, warm_up) for name, spec in specs.items()}
    for row in rows.values():
        row.update(alone[row["contender"]], median=statistics.median(row["speeds"]))
    title = f"{options.rounds} windows of {options.seconds:g} s, train.py's flags for ours: {' '.join(rest) or 'none'}"
    return {"title": title, "machine": machine_facts(), "contenders": rows, "ratios": ratios(rows)}


def start_alone(name: str, spec: dict[str, Any], warm_up: float) -> dict[str, float]:
    """Seconds to start, and memory (MB) after `warm_up` seconds of training, of a contender while no other one runs."""
    message(f"starting {name} alone")
    contender = Contender(name, spec)
    try:
        start = contender.reply(START_TIMEOUT)["start"]
        contender.train({"seconds": warm_up, "threads": 0})
        pss, rss = tree_memory(contender.process.pid)
    finally:
        contender.kill()
    return {"start": start, "pss_mb": pss, "rss_mb": rss}


def contenders_of(options: Options, rest: list[str]) -> dict[str, dict[str, Any]]:
    """Names of contenders and what their processes get; ValueError for a bad flag, before any process starts."""
    config = parse_config(rest)
    specs: dict[str, dict[str, Any]] = {}
    for backend in filter(None, options.ours.split(",")):
        specs[f"ours {backend}"] = {"kind": "ours", "args": ["--preset", "a2c-strict", *rest, "--backend", backend]}
        parse_config(specs[f"ours {backend}"]["args"])
    for part in filter(None, options.sb3_envs.split(",")):
        (n,), fork = counts("sb3_envs", part.removesuffix(" fork")), part.endswith(" fork")
        start = {"env": config.env, "num_envs": n, "cuda": config.cuda, "start_method": "fork" if fork else None}
        specs[f"SB3 {n} envs{', fork' * fork}"] = {"kind": "sb3", **start}
    return specs


def counts(field: str, text: str) -> list[int]:
    """Parse comma-separated counts; for threads, `default` is allowed too and becomes 0."""
    parts = text.split(",")
    if not all((part == "default" and field == "sb3_threads") or (part.isdigit() and int(part) > 0) for part in parts):
        raise ValueError(f"{field} must be comma-separated counts of at least 1, got {text!r}")
    return [0 if part == "default" else int(part) for part in parts]


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Medians of ours over the best of SB3, and of `async` over the best of SB3 with 50 environments."""
    pairs = [(name, best_of(rows, "SB3 ")) for name in rows if name.startswith("ours ")]
    pairs += [("ours async", best_of(rows, "SB3 50 envs"))] if "ours async" in rows else []
    return {f"{ours} / {peer}": rows[ours]["median"] / rows[peer]["median"] for ours, peer in pairs if peer}


def best_of(rows: dict[str, dict[str, Any]], prefix: str) -> str:
    """The name of the fastest row whose name begins with `prefix`; an empty string if there is none."""
    return max((name for name in rows if name.startswith(prefix)), key=lambda n: rows[n]["median"], default="")


def report(figures: dict[str, Any]) -> None:
    """Print facts, table and ratios."""
    console, table = make_console(), Table()
    console.print(", ".join(f"{name} {value}" for name, value in figures["machine"].items()), soft_wrap=True)
    console.print(figures["title"], soft_wrap=True)
    for column in ("contender", "decisions/s", "min .. max", "start s", "PSS MB", "what"):
        table.add_column(
            column,
            justify="left" if column in ("contender", "what") else "right",
            no_wrap=column not in ("contender", "what"),
        )
    for name, row in figures["contenders"].items():
        spread = f"{min(row['speeds']):,.0f} .. {max(row['speeds']):,.0f}"
        what = f"{row['note']}, {row['threads']} torch threads"
        table.add_row(name, f"{row['median']:,.0f}", spread, f"{row['start']:.1f}", f"{row['pss_mb']:,.0f}", what)
    console.print(table)
    for name, ratio in figures["ratios"].items():
        console.print(f"{name}: {ratio:.2f}", soft_wrap=True)


def message(text: str) -> None:
    """Print a line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Parse the flags, compare, print, write; returns the exit code."""
    if importlib.util.find_spec("stable_baselines3") is None:
        message('error: stable-baselines3 is not installed: pip install -c constraints.txt -e ".[bench]"')
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that the contenders are killed
    return run_benchmark(Options, HELP, compare, report, errors=(ValueError, RuntimeError, OSError))


if __name__ == "__main__":
    raise SystemExit(main())

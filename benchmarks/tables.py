"""Write the tables of README.md and docs/, and the learning curve, from the files in results/.

    python benchmarks/tables.py          # fills the text between <!-- NAME --> and <!-- /NAME -->; draws docs/pong.png
    python benchmarks/tables.py --check  # changes nothing; exit code 1 if a document is out of date

A table holds runs of one commit on one kind of processor, which the line above it names (but see trials.py). Every
seed that was run is counted; a run that missed its target is a row, or a part of the count, like any other.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from comparisons import RESULTS, learning, measured, search, table
from game_scores import GAMES, LONG, SHORT, entropy_bonuses, mean_scores, runs_with_preset, scores
from rank_tests import rank_tests
from scaling_model import fit
from trials import game_trials, sticky_trials, trials

from a2c.metrics.meters import WINDOW
from a2c.metrics.results import median, moving_mean, read_episodes
from a2c.run.about import name_instructions

ROOT = Path(__file__).parents[1]
CURVE = ROOT / "docs" / "pong.png"
MACHINES = ((1, 8, 2, 128), (1, 16, 4, 512), (4, 16, 4, 2_048), (16, 16, 4, 10_000))  # hosts, ranks, threads, envs
PRICE = 0.04  # USD per core hour, an assumption


def read_all(group: Path) -> list[dict[str, Any]]:
    """The figures of a benchmark's files, in the order of their names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(group.glob("*.json"))]


def machine(figures: dict[str, Any]) -> dict[str, Any]:
    """Where a benchmark ran: its processor is named with its instructions, as in the about.json of a comparison."""
    return name_instructions(figures["machine"])


def throughput(group: Path) -> str:
    """Speed of training, and of its stages alone, compared with the bound that the cores set."""
    header = ("preset", "backend", "environments alone", "acting alone", "learning alone", "training", "of the bound")
    measurements, rows = read_all(group), []
    for figures in measurements:
        config, median = figures["config"], figures["median"]
        stages = (f"{median[stage]:,.0f}" for stage in ("environments", "acting", "learning", "end to end"))
        backend = f"`{config['backend']}` x {config['num_envs']}"
        rows.append((f"`{config['preset']}`", backend, *stages, f"{figures['share_of_core_bound']:.0%}"))
    return measured([machine(figures) for figures in measurements]) + table(header, rows)


def gpu(group: Path) -> str:
    """Speed of training on a GPU, with CUDA graphs and without, and on the CPU beside it; and of environments alone."""
    header = ("preset", "backend", "network on", "environments alone", "training", "share", "GPU memory of tensors")
    measurements, rows = read_all(group), []
    for figures in measurements:
        config, median = figures["config"], figures["median"]
        what = f"`{config['preset']}`", f"`{config['backend']}` x {config['num_envs']}"
        peak, graphs = figures["peak_gpu_mb"], f"GPU, {'with' if figures['cuda_graphs'] else 'without'} CUDA graphs"
        place, memory = ("CPU", "-") if peak is None else (graphs, f"{peak:,.0f} MB")
        speeds = [f"{median[stage]:,.0f}" for stage in ("environments", "end to end")]
        rows.append((*what, place, *speeds, f"{figures['share_of_environments']:.0%}", memory))
    gpus = " and ".join(sorted({name for figures in measurements if (name := figures["machine"]["gpu"])}))
    return measured([{**machine(figures), "gpu": gpus} for figures in measurements]) + table(header, rows)


def scaling(group: Path) -> str:
    """Speed on several ranks beside that of the model, fitted to one rank of one thread and to single steps."""
    header = ("preset", "ranks", "threads of each", "decisions/s: median (min to max)", "of the first", "model")
    measurements, rows = read_all(group), []
    for figures in measurements:
        model, cores = fit(figures), figures["machine"]["cores"]
        for row in figures["layouts"]:
            ranks, threads, speeds = row["ranks"], row["threads"], row["speeds"]
            speed = f"{median(np.array(speeds)):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
            known = ranks * threads <= cores
            predicted = f"{model.speed(ranks, threads, model.num_envs):,.0f}" if known else "-"
            preset = f"`{figures['config']['preset']}`"
            rows.append((preset, str(ranks), str(threads), speed, f"{row['speedup']:.2f}", predicted))
    return measured([machine(figures) for figures in measurements]) + table(header, rows)


def scaled(group: Path) -> str:
    """What the model says of machines that were not measured."""
    header = ("preset", "hosts x ranks x threads", "environments", "decisions/s, at most", "of the bound", "all-reduce")
    rows, notes = [], []
    for figures in read_all(group):
        model, preset = fit(figures), f"`{figures['config']['preset']}`"
        for hosts, here, threads, num_envs in MACHINES:
            speed = model.speed(hosts * here, threads, num_envs, hosts)
            bound = f"{speed * model.per_decision / (hosts * here * threads):.0%}"
            reduce = f"{1000 * model.all_reduce(hosts * here, hosts):.1f} ms"
            place = f"{hosts} x {here} x {threads}"
            rows.append((preset, place, f"{num_envs:,}", f"{speed:,.0f}", bound, reduce))
        hours = model.core_hours(1e9)
        notes.append(
            f"{preset}: an all-reduce adds up {model.bytes:,} bytes. A billion frames are at least {hours:,.0f} core "
            f"hours, {hours * PRICE:,.2f} USD at {PRICE} USD each. 30,000 decisions/s with 1,024 environments need "
            f"{model.cores(30_000, 1_024) or 'more than 1,024'} cores or more; 200,000 with 10,000 environments need "
            f"{model.hosts(200_000, 10_000, 16, 4) or 'more than 625'} hosts of 64 cores or more.\n"
        )
    return table(header, rows) + "\n" + "\n".join(notes)


def sb3(group: Path) -> str:
    """Speed of training compared with Stable-Baselines3, in alternating windows; a file per comparison.

    Of the numbers of threads that a contender was given, the fastest is its row.
    """
    header = ("instructions", "trainer", "decisions/s: median (min to max)", "ratio to SB3", "start", "memory (PSS)")
    measurements, rows = read_all(group), []
    for figures in measurements:
        instructions = figures["machine"]["instructions"].removesuffix(" with bfloat16")
        measured_rows = figures["contenders"].values()
        fastest = {row["contender"]: row for row in sorted(measured_rows, key=lambda row: row["median"])}
        best = max(row["median"] for name, row in fastest.items() if name.startswith("SB3"))
        for name in dict.fromkeys(row["contender"] for row in measured_rows):
            row = fastest[name]
            speed = f"{row['median']:,.0f} ({min(row['speeds']):,.0f} to {max(row['speeds']):,.0f})"
            ratio, start, memory = f"{row['median'] / best:.2f}", f"{row['start']:.1f} s", f"{row['pss_mb']:,.0f} MB"
            what = f"{re.sub(r' [0-9]+ envs', '', name)} ({row['note']})"  # the note has number and precision
            rows.append((instructions, what, speed, ratio, start, memory))
    return measured([figures["machine"] for figures in measurements]) + table(header, rows)


def runs_of(group: Path) -> list[Path]:
    """The run directories of a group, in order of their names."""
    return sorted(path.parent for path in group.glob("**/episodes.csv"))


def draw_curves(group: Path, path: Path) -> None:
    """Draw the score of every run of a group against its decisions: episodes as points, their moving mean as a line."""
    from matplotlib.figure import Figure  # slow to import, and not needed to check the tables

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for run in runs_of(group):
        episodes = read_episodes(run)
        steps, means = episodes["env_steps"] / 1e3, moving_mean(episodes["score"])
        (line,) = axes.plot(steps, means, lw=2, label=f"seed {run.name.rpartition('-')[2]}")
        axes.plot(steps, episodes["score"], ".", ms=2, alpha=0.25, color=line.get_color())
    axes.set(xlabel="decisions (thousands)", ylabel="score of Pong (game points)", ylim=(-21.5, 21.5))
    axes.grid(alpha=0.3)
    columns = 1 + (len(axes.lines) > 10)  # two lines per run
    title = f"mean of the last {WINDOW} episodes"
    axes.legend(title=title, loc="lower right", fontsize=8, title_fontsize=8, ncols=columns)
    figure.savefig(path, dpi=120, metadata={"Software": None})


Tables = dict[str, tuple[Callable[..., str], Sequence[str]]]
DOCUMENTS: dict[str, Tables] = {  # file: marker: function that makes the table, from which directories in results/
    "README.md": {
        "pong-fast": (learning, ["pong-fast"]),
        "mean-scores": (mean_scores, runs_with_preset(LONG)),
        "games": (scores, runs_with_preset(LONG)),
        "more-games": (scores, runs_with_preset(SHORT)),
        "two-cores": (learning, ["pong-fast-two-cores"]),
        "more": (learning, ["default"]),
        "avx2": (learning, ["pong-fast-avx2", "default-avx2"]),
        "strict": (learning, ["strict"]),
        "pong-sticky": (learning, ["pong-sticky"]),
        "a2c-strict": (learning, ["a2c-strict"]),
        "family": (learning, ["family"]),
        "lstm": (learning, ["lstm"]),
        "learning-gpu": (learning, ["default-gpu", "pong-fast-gpu"]),
        "gpu": (gpu, ["gpu"]),
        "cartpole": (learning, ["cartpole", "cartpole-lstm"]),
        "throughput": (throughput, ["throughput"]),
        "sb3": (sb3, ["sb3"]),
    },
    "docs/scaling.md": {"scaling": (scaling, ["scaling"]), "model": (scaled, ["scaling"])},
    "docs/experiments.md": {
        "environments": (trials, ["environments-trials.csv"]),
        "epochs": (trials, ["epochs-trials.csv"]),
        "trials": (trials, ["trials.csv"]),
        "sticky": (sticky_trials, ["sticky-trials.csv"]),
        "games": (game_trials, ["game-trials.csv"]),
        "entropy-bonus": (entropy_bonuses, GAMES),
        "search": (
            search,
            [
                *("pong-fast", "pong-fast-two-cores", "pong-fast-avx2", "default", "default-avx2"),
                *("strict", "family", "lstm"),
            ],
        ),
        "rank-tests": (rank_tests, ["rank-tests.csv"]),
    },
}


def fill(text: str, tables: Tables) -> str:
    """`text` with the table between each pair of markers replaced; ValueError if a marker is missing."""
    for name, (make, patterns) in tables.items():
        between = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", flags=re.S)
        if (found := len(between.findall(text))) != 1:
            raise ValueError(f"the document must hold the markers of the table {name} once, got {found}")
        made = make(*(path for pattern in patterns for path in sorted(RESULTS.glob(pattern))))
        filled = f"\n{made}\n" if made else ""
        text = between.sub(lambda _, filled=filled: filled, text)
    return text


def main() -> int:
    """Fill or check the documents; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the documents' tables and the learning curve from results/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if one is out of date")
    check = parser.parse_args().check
    for name, tables in DOCUMENTS.items():
        old = (ROOT / name).read_text(encoding="utf-8")
        new = fill(old, tables)
        if check and new != old:
            return 1
        if not check:
            (ROOT / name).write_text(new, encoding="utf-8")
    if not check:
        draw_curves(RESULTS / "pong-fast", CURVE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

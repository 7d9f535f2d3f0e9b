"""The documents' tables and curve: what the script reads, counts and refuses; the documents hold what it writes."""

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import game_scores
import pytest
import tables
from comparisons import read_rows
from trials import game_trials, sticky_trials, trials

from a2c import Config
from a2c.config.resolve import resolve
from a2c.metrics.results import best_mean, first_passage, read_episodes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
README = BENCHMARKS.parent / "README.md"
ABOUT = {"commit": "abc1234", "cores": 2, "processor": "X", "torch": "2"}
OF_A_RUN = {"env", "seed", "threads", "run_dir", "resume", "target_score", "total_env_steps"}


def write_game(group: Path, evaluation: dict, seed: int = 7) -> None:
    """The evaluation of a game's policy, its seed, and where it was trained."""
    group.mkdir(parents=True, exist_ok=True)
    (group / "compare.csv").write_text(f"setting,seed\natari,{seed}\n")
    (group / "about.json").write_text(json.dumps(ABOUT))
    (group / "evaluation.json").write_text(json.dumps(evaluation))


def write_run(run: Path, scores: list[float], env_steps: int = 1000) -> None:
    """A finished run with an episode of each score every `env_steps` decisions and 10 seconds."""
    run.mkdir(parents=True)
    with open(run / "episodes.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("env_steps", "seconds", "score", "length"))
        writer.writerows((env_steps * (i + 1), 10 * (i + 1), score, 5) for i, score in enumerate(scores))
    with open(run / "metrics.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("env_steps", "seconds", "policy_lag"))
        writer.writerow((env_steps * len(scores), 10 * len(scores), 1.5))


def test_documents_hold_what_the_script_writes():
    check = [sys.executable, str(BENCHMARKS / "tables.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"run python benchmarks/tables.py\n{done.stderr}"


def test_first_passage_is_the_first_episode_at_which_a_full_window_reaches_the_target(tmp_path):
    write_run(tmp_path / "a", [20.0] * 50 + [10.0] * 50 + [20.0] * 60)  # 50 of 100 at 20 until the lows leave
    episodes = read_episodes(tmp_path / "a")
    assert first_passage(episodes, 15.0) == (100_000, 1000.0)
    assert first_passage(episodes, 16.0) == (160_000, 1600.0)
    assert first_passage(episodes, 16.1) is None
    assert best_mean(episodes) == 16.0


def test_trials_table_lists_a_few_runs_and_sums_up_many(tmp_path):
    for seed in range(8):
        write_run(tmp_path / f"many/seed-{seed}", [15.0] * (20 + seed) + [18.0] * 100 if seed else [15.0] * 20)
    write_run(tmp_path / "few/a", [14.0] * 30 + [16.0] * 10)
    write_run(tmp_path / "few/b", [10.0] * 5 + [14.0] * 20)
    write_run(tmp_path / "few/c", [20.0] * 100)
    (tmp_path / "trials.csv").write_text('change,runs\n"x, y",few/[ab] few/c\nz,many/*\n')
    *_, few, many = trials(tmp_path / "trials.csv").splitlines()
    assert few == "| x, y | 3 | 40,000; 14.0 at 25,000; 20,000 | -; -; 100,000 |"
    assert many == "| z | 8 | 20,000 (20,000 to 20,000) | 124,500 (121,000 to -) |"  # the first never got to 18
    (tmp_path / "trials.csv").write_text("change,runs\nx,none/*\n")
    with pytest.raises(ValueError, match=r"runs must match directories in .*, got none/\*"):
        trials(tmp_path / "trials.csv")


def test_sticky_table_counts_what_a_run_did_after_it_was_changed(tmp_path):
    write_run(tmp_path / "a", [18.5] * 100 + [10.0] * 100)
    write_run(tmp_path / "b", [0.0] * 50 + [17.0] * 100)
    (tmp_path / "sticky-trials.csv").write_text(
        'change,runs,after\n"x, y",a b,0\nz,a,50000\nshort,b,49000\nfew,b,51000\n'
    )
    *_, both, later, short, few = sticky_trials(tmp_path / "sticky-trials.csv").splitlines()
    assert both == "| x, y | 100,000; - | 18.5; 17.0 | 10.0; 17.0 | 200,000; 150,000 |"
    assert later == "| z | - | 14.2 | 10.0 | 200,000 |"
    assert short == "| short | - | 17.0 | 17.0 | 150,000 |"
    assert few == "| few | - | - | 17.0 | 150,000 |"


def test_table_of_several_games_has_the_mean_of_the_last_hundred_episodes_at_each_mark(tmp_path):
    write_run(tmp_path / "a", [1000.0] * 100 + [3000.0] * 400 + [9.0] * 100, env_steps=2500)
    write_run(tmp_path / "b", [5.0] * 110, env_steps=9000)
    (tmp_path / "game-trials.csv").write_text("game,change,runs\nQbert,nothing,[ab]\n")
    *_, row = game_trials(tmp_path / "game-trials.csv").splitlines()
    assert row == "| Qbert | nothing | 2 | 3,000.0; 5.0 | 3,000.0; 5.0 | 9.0; - | -; - | -; - | -; - |"


def test_runs_of_games_have_a_row_each_beside_published_results(tmp_path, monkeypatch):
    figures = {"mean": 1234.56, "interval": [1200.0, 1300.0], "human_normalized": 0.512}
    (tmp_path / "zoo-scores.csv").write_text(
        "algorithm,game,mean,std,episodes\nA2C,Qbert,3882,1200,101\nPPO,Qbert,15627,,\nA2C,Pong,17.3,3,10\n"
    )
    monkeypatch.setattr(game_scores, "RESULTS", tmp_path)
    groups = [tmp_path / name for name in ("atari/boxing", "atari/qbert", "second-seeds/qbert", "atari/pong")]
    for seed, group in enumerate(groups):
        game = {"env": f"{group.name.title()}NoFrameskip-v4", "env_steps": 2_000_000}
        write_game(group, {**figures, **game, "mean": 1234.56 + seed}, seed=seed)
    assert game_scores.mean_scores(*groups[:3]) == (
        "* Boxing: 1,234.6\n* Qbert: 1,235.6 and 1,236.6 (A2C 3,882.0, PPO 15,627.0)\n"
    )
    text = game_scores.scores(*groups)
    interval, zoo = "(1,200.0 to 1,300.0) | 51%", "3,882.0 (3,643.9 to 4,120.1) | 15,627.0"
    title, machine, rows = text.split("\n\n")
    assert (
        "RL Baselines3 Zoo" in title
        and "after 2,000,000 decisions" in title
        and machine == "Commit abc1234, 2 cores of X, torch 2."
    )
    assert rows.splitlines()[2:] == [
        f"| [Boxing](results/atari/boxing) | 0 | 1,234.6 {interval} | - | - |",
        f"| [Qbert](results/atari/qbert) | 1 | 1,235.6 {interval} | {zoo} |",
        f"| [Qbert](results/second-seeds/qbert) | 2 | 1,236.6 {interval} | {zoo} |",
        f"| [Pong](results/atari/pong) | 3 | 1,237.6 {interval} | 17.3 (15.0 to 19.6) | - |",
    ]
    (groups[1] / "about.json").write_text(json.dumps({**ABOUT, "commit": "def5678"}))
    again, *parts = game_scores.scores(*groups).split("\n\n")
    assert again == title and [part.splitlines()[2:] or part for part in parts] == [
        machine,
        [rows.splitlines()[2], *rows.splitlines()[4:]],
        machine.replace("abc1234", "def5678"),
        [rows.splitlines()[3]],
    ]


def test_two_entropy_bonuses_have_the_training_means_where_they_part_and_the_last_policies(tmp_path, monkeypatch):
    monkeypatch.setattr(game_scores, "RESULTS", tmp_path)
    for name, early, mean in ((".", 1.0, 1000.0), ("atari", 2.0, 950.0), ("second-seeds", 3.0, 910.0)):
        group = tmp_path / name / "qbert"
        write_run(group / "atari" / "seed-1", [early] * 200 + [9.0] * 300, env_steps=2000)
        figures = {"mean": mean, "interval": [mean - 5, mean + 5], "env": "QbertNoFrameskip-v4", "env_steps": 1_000_000}
        write_game(group, figures)
    *_, row = game_scores.entropy_bonuses(tmp_path / "qbert").splitlines()
    means = "1,000.0 (995.0 to 1,005.0) | 950.0 (945.0 to 955.0); 910.0 (905.0 to 915.0)"
    assert row == f"| Qbert | 1,000,000 | 1.0; 2.0; 3.0 | {means} | -7.0% |"
    shutil.rmtree(tmp_path / "second-seeds")
    *_, row = game_scores.entropy_bonuses(tmp_path / "qbert").splitlines()
    assert row == "| Qbert | 1,000,000 | 1.0; 2.0 | 1,000.0 (995.0 to 1,005.0) | 950.0 (945.0 to 955.0) | -5.0% |"


@pytest.mark.parametrize(
    ("folders", "changes"), [(game_scores.SEEDS, {}), (["."], {"entropy_final": 1.0, "entropy_hold": 0.0})]
)
def test_games_were_trained_with_the_settings_of_todays_preset(folders, changes):
    preset = asdict(resolve(Config.from_preset("atari", **changes), (4, 84, 84)))
    settings = {name: value for name, value in preset.items() if name not in OF_A_RUN}
    configs, *second = (sorted((game_scores.RESULTS / folder).glob("*/atari/seed-*/config.json")) for folder in folders)
    assert [path.parents[2].name for path in configs] == game_scores.GAMES and len(configs) == 10
    for path in [*configs, *chain(*second)]:
        config = json.loads(path.read_text())
        assert {name: config[name] for name in settings} == settings, path
        assert config["total_env_steps"] == (2_000_000 if path.parents[2].name in game_scores.SHORT else 10_000_000)


def column_of(runs: list[str], column: str) -> list[float]:
    """A column of the compare.csv of some comparisons."""
    return [row[column] for run in runs for row in read_rows(game_scores.RESULTS / run / "compare.csv")]


def test_readme_names_the_hours_of_the_games():
    # Those with a constant bonus: two of the others had two threads.
    hours = [seconds / 3600 for seconds in column_of(game_scores.LONG, "seconds")]
    assert f"one core: {min(hours):.1f} to {max(hours):.1f} hours" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("takes {:.0f} to {:.0f} minutes on two cores", "pong-fast-two-cores"),
        ("{:.0f} to {:.0f} without AVX-512", "pong-fast-avx2"),
        ("network | [{:.0f} to {:.0f} minutes](#more-results-on-pong) ({} seeds)", "pong-fast-two-cores"),
        ("AVX2: {:.0f} to {:.0f} ({} seeds)", "pong-fast-avx2"),
        ("two heads | [{:.0f} to {:.0f} minutes](#more-results-on-pong) ({} seeds); AVX2", "default"),
        ("AVX2: {:.0f} to {:.0f} ({} seeds)", "default-avx2"),
        ("once | [{:.0f} to {:.0f} minutes](#more-results-on-pong) ({} seeds)", "a2c-strict"),
    ],
)
def test_readme_names_the_minutes_of_the_presets(text, run):
    minutes = [seconds / 60 for seconds in column_of([run], "seconds_to_target")]
    assert text.format(min(minutes), max(minutes), len(minutes)) in README.read_text(encoding="utf-8")


def test_tutorial_names_decisions_and_minutes_of_pong():
    text = (BENCHMARKS.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
    steps = column_of(["pong-fast-two-cores"], "steps_to_target")
    fast = [seconds / 60 for seconds in column_of(["pong-fast-two-cores"], "seconds_to_target")]
    slow = [seconds / 60 for seconds in column_of(["pong-fast-avx2"], "seconds_to_target")]
    assert f"after {min(steps):,.0f} to {max(steps):,.0f} decisions" in text
    assert f"in {min(fast):.0f} to {max(fast):.0f}\nminutes" in text
    assert f"without AVX-512, took {min(slow):.0f} to {max(slow):.0f}." in text


def test_games_of_a_table_have_as_many_decisions(tmp_path):
    facts = {"mean": 1.0, "interval": [0.5, 1.5], "human_normalized": 1.0, "env_steps": 10_000_000}
    write_game(tmp_path, {**facts, "env": "PongNoFrameskip-v4"})
    title, _, rows = game_scores.scores(tmp_path).split("\n\n")
    assert "after 10,000,000 decisions" in title and "| human | Zoo A2C | Zoo PPO |" in rows
    assert rows.splitlines()[2].endswith(" | 1.0 (0.5 to 1.5) | 100% | 17.3 (16.5 to 18.1) | 21.0 (21.0 to 21.0) |")
    shutil.copytree(tmp_path, tmp_path / "other")
    (tmp_path / "evaluation.json").write_text(json.dumps({**facts, "env": "QbertNoFrameskip-v4", "env_steps": 100}))
    with pytest.raises(ValueError, match=r"must have as many decisions, got \[100, 10000000\]"):
        game_scores.scores(tmp_path, tmp_path / "other")


def test_sb3_table_has_the_fastest_number_of_threads_of_each_contender(tmp_path):
    rows = {}
    for name, threads, speed in (
        ("ours async", 0, 900.0),
        ("SB3 50 envs", 0, 400.0),
        ("SB3 50 envs", 1, 500.0),
        ("SB3 50 envs, fork", 0, 600.0),
        ("SB3 50 envs, fork", 1, 300.0),
    ):
        figures = {"contender": name, "note": "50 envs, X", "start": 2.0, "pss_mb": 1000.0}
        rows[f"{name}, {threads}"] = {**figures, "speeds": [speed - 10, speed, speed + 10], "median": speed}
    machine = {**ABOUT, "instructions": "AVX2"}
    (tmp_path / "a.json").write_text(json.dumps({"machine": machine, "contenders": rows}))
    assert tables.sb3(tmp_path).splitlines()[4:] == [
        "| AVX2 | ours async (50 envs, X) | 900 (890 to 910) | 1.50 | 2.0 s | 1,000 MB |",
        "| AVX2 | SB3 (50 envs, X) | 500 (490 to 510) | 0.83 | 2.0 s | 1,000 MB |",
        "| AVX2 | SB3, fork (50 envs, X) | 600 (590 to 610) | 1.00 | 2.0 s | 1,000 MB |",
    ]


def test_games_without_a_game_are_empty():
    assert game_scores.scores() == ""


def test_gpu_table_has_the_medians_of_files_with_cuda_graphs_without_and_without_the_gpu(tmp_path):
    for name, graphs, speed, gpu in (
        ("a", False, 3000.4, "H100"),
        ("b", True, 9000.0, "H100"),
        ("c", False, 1500.0, None),
    ):
        median = {"environments": 15_000.0, "end to end": speed}
        machine = {**ABOUT, "gpu": gpu, "instructions": "AVX512 with bfloat16"}
        figures = {"machine": machine, "config": {"preset": "pong-fast"}, "cuda_graphs": graphs}
        figures["config"] |= {"backend": "native", "num_envs": 16}
        figures |= {"median": median, "share_of_environments": speed / 15_000}
        figures["peak_gpu_mb"] = 508.4 if gpu else None
        (tmp_path / f"{name}.json").write_text(json.dumps(figures))
    text = tables.gpu(tmp_path)
    assert text.startswith("Commit abc1234, 2 cores of X (AVX512-BF16), H100, torch 2.\n")
    assert text.endswith(
        "| `pong-fast` | `native` x 16 | GPU, without CUDA graphs | 15,000 | 3,000 | 20% | 508 MB |\n"
        "| `pong-fast` | `native` x 16 | GPU, with CUDA graphs | 15,000 | 9,000 | 60% | 508 MB |\n"
        "| `pong-fast` | `native` x 16 | CPU | 15,000 | 1,500 | 10% | - |\n"
    )


def test_tables_of_two_commits_or_gpus_are_refused():
    with pytest.raises(ValueError, match="one commit"):
        tables.measured([ABOUT, {**ABOUT, "gpu": "H100"}])
    with pytest.raises(ValueError, match="one commit"):
        tables.measured([{**ABOUT, "gpu": [None, "H100"]}])
    with pytest.raises(ValueError, match="one commit"):
        tables.measured([ABOUT, {**ABOUT, "commit": "def5678"}])
    with pytest.raises(ValueError, match="one kind of processor"):
        kinds = "AVX2", "AVX512 with bfloat16"
        tables.measured([tables.machine({"machine": {**ABOUT, "instructions": kind}}) for kind in kinds])


def test_a_table_of_a_comparison_that_was_continued_by_another_commit_is_refused():
    with pytest.raises(ValueError, match="one commit"):
        tables.measured([{**ABOUT, "commit": ["abc1234", "def5678"]}])


def test_tables_refuse_a_missing_marker():
    with pytest.raises(ValueError, match="markers"):
        tables.fill("no table here", tables.DOCUMENTS["README.md"])


def test_learning_curve_is_drawn_from_every_run_of_the_group(tmp_path):
    write_run(tmp_path / "group" / "a2c-0", [19.0] * 10)
    write_run(tmp_path / "group" / "a2c-1", [16.0] * 10)
    tables.draw_curves(tmp_path / "group", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_is_made_of_the_directories_that_its_patterns_find(tmp_path, monkeypatch):
    monkeypatch.setattr("tables.RESULTS", tmp_path)
    made = {"names": (lambda *groups: "".join(f"{group.name}\n" for group in groups), ["b", "search-*", "c"])}
    text = "x\n<!-- names -->\nold\n<!-- /names -->\ny\n"
    assert tables.fill(text, made) == "x\n<!-- names -->\n<!-- /names -->\ny\n"
    for name in ("search-2", "search-1", "b", "a"):
        (tmp_path / name).mkdir()
    filled = "x\n<!-- names -->\n\nb\nsearch-1\nsearch-2\n\n<!-- /names -->\ny\n"
    assert tables.fill(text, made) == tables.fill(filled, made) == filled

"""The tables of comparisons, made by the package's own functions; what keep.py copies; the commands in results/."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fake_train
import pytest
import tables
from comparisons import RESULTS, about
from keep import keep

from a2c.cli.flags import parse_command
from a2c.cli.grid import make_runs
from a2c.config.config import Config
from a2c.tools.compare import report
from a2c.tools.runs import Run

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
LINES = re.findall(r"^a2c compare (runs/results/(\S+) .*)$", (ROOT / "results/commands.sh").read_text(), flags=re.M)
ABOUT = {"commit": "abc1234", "cores": 2, "processor": "X", "torch": "2"}
LINE = "Commit abc1234, 2 cores of X, torch 2."


def write_comparison(out: Path, scores: dict[str, list[float | None]], about: dict | None = None, **changes) -> Path:
    """A comparison of settings by the score of every episode of each seed; None is a run that failed at once.

    A run has its score after 1,000 decisions in 50 seconds. The policy kept at 500 has a point less than at 1,000.
    """
    config = replace(Config.from_preset("pong-fast"), threads=1, target_score=18.0, keep_policy_every=500)
    runs, codes = [], {}
    for setting, seeds in scores.items():
        for seed, score in enumerate(seeds):
            run = Run(setting, {}, replace(config, seed=seed, **changes), ())
            runs, codes[run.name] = [*runs, run], int(score is None)
            if score is not None:
                (out / run.name).mkdir(parents=True)
                fake_train.write(out / run.name, score)
                (out / run.name / "config.json").write_text(run.config.to_json())
                means = f"env_steps,mean\n500,{score - 1}\n1000,{score}\n"
                (out / run.name / "evaluations.csv").write_text(means)
    facts = ABOUT | {"command": f"a2c compare {out.name} --seeds 0..1", "jobs": 2} | (about or {})
    (out / "about.json").write_text(json.dumps(facts))
    report(out, runs, codes)
    return out


def test_learning_table_has_a_row_per_setting_over_all_seeds_of_several_comparisons(tmp_path):
    fast = write_comparison(tmp_path / "fast", {"pong-fast": [18.0, 20.0]})
    scores = {"epochs=1": [18.0], "epochs=2": [10.0, 18.5, None]}
    tried = write_comparison(tmp_path / "tried", scores, total_env_steps=9000)
    line, blank, header, _, *rows = tables.learning(fast, tried).splitlines()
    assert line == f"{LINE} Runs at a time: 2; compute threads of each: 1." and blank == ""
    assert "decisions to 18: median (95 % interval)" in header and "median time to 18" in header
    env = "`PongNoFrameskip-v4`"
    assert rows == [
        f"| [fast](results/fast) | {env} | `pong-fast` | 2 of 2 | 1,000 | 1,000 | 750 (500 to 1,000) | 0:00:50 | 20 |",
        f"| [tried](results/tried) | {env} | `pong-fast`, `epochs=1` | 1 of 1 | 1,000 | 1,000 | 1,000 | 0:00:50 | 20 |",
        f"| [tried](results/tried) | {env} | `pong-fast`, `epochs=2` | 1 of 3 | > 9,000 (1,000 to > 9,000) | > 9,000 "
        "| > 9,000 (1,000 to > 9,000) | - | 20 |",
    ]


def test_learning_table_has_no_column_for_policies_that_were_not_kept(tmp_path):
    group = write_comparison(tmp_path / "x", {"pong-fast": [18.0, 20.0]}, keep_policy_every=0)
    _, _, header, _, row = tables.learning(group).splitlines()
    assert "frozen" not in header and header.count("|") == row.count("|") == 9
    assert row.endswith("| 2 of 2 | 1,000 | 1,000 | 0:00:50 | 20 |")


def test_learning_table_without_a_comparison_is_empty():
    assert tables.learning() == "" == tables.search()


def test_learning_table_names_every_number_of_runs_at_a_time(tmp_path):
    group = write_comparison(tmp_path / "x", {"pong-fast": [19.0]}, {"jobs": [2, 1]}, threads=0)
    assert "Runs at a time: 1 or 2; compute threads of each: 2." in tables.learning(group)


def test_learning_table_names_a_gpu_in_place_of_threads(tmp_path):
    group = write_comparison(tmp_path / "x", {"pong-fast": [19.0]}, {"gpu": "H100"}, cuda=True)
    assert tables.learning(group).startswith("Commit abc1234, 2 cores of X, H100, torch 2. Runs at a time: 2.\n")


def test_a_comparison_of_several_commits_or_targets_has_no_table(tmp_path):
    mixed = write_comparison(tmp_path / "mixed", {"pong-fast": [19.0]}, {"commit": ["abc1234", "def5678"]})
    for make in (tables.learning, tables.search):
        with pytest.raises(ValueError, match="one commit"):
            make(mixed)
    one = write_comparison(tmp_path / "one", {"pong-fast": [19.0]})
    other = write_comparison(tmp_path / "other", {"pong-fast": [19.0]}, {"commit": "def5678"})
    with pytest.raises(ValueError, match="one commit"):
        tables.learning(one, other)
    assert tables.search(one, other).count("| `pong-fast` |") == 2  # a table each
    with pytest.raises(ValueError, match="one target score"):
        tables.learning(one, write_comparison(tmp_path / "low", {"pong-fast": [19.0]}, target_score=15.0))


def test_a_setting_without_settings_is_refused(tmp_path):
    group = write_comparison(tmp_path / "x", {"pong-fast": [19.0]})
    (group / "pong-fast/seed-0/config.json").unlink()
    with pytest.raises(ValueError, match=r"x must hold a config\.json of a run with pong-fast"):
        tables.learning(group)


def test_search_table_has_the_figures_of_every_seed(tmp_path):
    group = write_comparison(tmp_path / "search-x", {"epochs=1": [18.0, 19.0], "epochs=2": [16.5, None]})
    assert tables.search(group) == (
        f"```\na2c compare search-x --seeds 0..1\n```\n\n{LINE}\n\n"
        "| decisions to 18 | seed 0 | seed 1 |\n| --- | --- | --- |\n"
        "| `epochs=1` | 1,000; frozen 1,000 | 1,000; frozen 500 |\n"
        "| `epochs=2` | never (best 16.5 in 1,200); frozen never | failed; frozen never |\n"
    )


def test_search_table_shows_all_commands_and_leaves_out_what_was_not_kept(tmp_path):
    about = {"command": ["a2c compare x", "a2c compare x --seeds 0..1"]}
    group = write_comparison(tmp_path / "x", {"pong-fast": [0.0, 18.0]}, about, keep_policy_every=0)
    text = tables.search(group)
    assert text.startswith("```\na2c compare x\na2c compare x --seeds 0..1\n```\n")
    assert text.endswith("| `pong-fast` | never (best 0.0 in 1,200) | 1,000 |\n")


def test_keep_copies_tables_and_picture_and_of_a_run_what_tables_are_made_of(tmp_path):
    out = write_comparison(tmp_path / "out", {"pong-fast": [19.0, None]})
    for name in ("status.json", "lock", "pong-fast/seed-0.log", "pong-fast/seed-0/latest.pt", "pong-fast/seed-0/x/y"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    keep(out, tmp_path / "kept/out")
    names = ("config.json", "episodes.csv", "metrics.csv", "evaluations.csv")
    run = {f"pong-fast/seed-0/{name}" for name in names}
    kept = {str(path.relative_to(tmp_path / "kept/out")) for path in (tmp_path / "kept/out").rglob("*.*")}
    assert kept == run | {"about.json", "compare.csv", "summary.csv", "compare.png"}
    assert tables.learning(tmp_path / "kept/out") == tables.learning(out)


def test_keep_copies_the_published_policy_of_a_game_with_its_evaluation_and_video(tmp_path):
    out, names = write_comparison(tmp_path / "out", {"atari": [19.0]}), ("latest.pt", "evaluation.json", "film.webp")
    for name in names:
        (out / name).write_text(name)
    keep(out, tmp_path / "kept")
    assert [(tmp_path / "kept" / name).read_text() for name in names] == list(names)


def test_keep_replaces_an_earlier_comparison_and_nothing_else(tmp_path):
    out, kept = write_comparison(tmp_path / "out", {"epochs=1": [19.0]}), tmp_path / "kept"
    keep(write_comparison(tmp_path / "before", {"epochs=3": [19.0]}), kept)
    keep(out, kept)
    assert [path.name for path in kept.iterdir() if path.is_dir()] == ["epochs=1"]
    with pytest.raises(ValueError, match="kept must be a new directory or an earlier comparison"):
        keep(out, tmp_path)
    (out / "summary.csv").unlink()
    with pytest.raises(ValueError, match=r"out must be a finished comparison, got .*out without summary\.csv"):
        keep(out, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_keep_says_in_one_line_what_is_wrong(tmp_path):
    args = [sys.executable, str(BENCHMARKS / "keep.py"), str(tmp_path), str(tmp_path / "kept")]
    done = subprocess.run(args, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "error: out must be a finished comparison" in done.stderr


@pytest.mark.parametrize(("line", "name"), LINES, ids=[name for _, name in LINES])
def test_every_command_in_results_is_one_that_a2c_takes_and_has_a_table(line, name):
    assert make_runs(*parse_command(["compare", *shlex.split(line)]))
    patterns = [pattern for made in tables.DOCUMENTS.values() for _, places in made.values() for pattern in places]
    assert any(Path("/", name).match(f"/{pattern}") for pattern in patterns)


@pytest.mark.parametrize(
    "summary",
    sorted(path for pattern in ("*", "atari/*", "second-seeds/*") for path in RESULTS.glob(f"{pattern}/summary.csv")),
    ids=lambda path: str(path.parent.relative_to(RESULTS)),
)
def test_every_comparison_in_results_was_made_by_its_command(summary):
    (line,) = (line for line, name in LINES if name == str(summary.parent.relative_to(RESULTS)))
    command = about(summary.parent)["command"]
    made_by = [command] if isinstance(command, str) else command
    assert line.split()[1:] in [shlex.split(one)[3:] for one in made_by]  # out may have been elsewhere

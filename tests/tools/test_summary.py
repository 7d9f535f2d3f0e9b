"""The tables of a comparison: every run counts, one that missed its target as longer than any other."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from a2c.config.config import Config
from a2c.tools.runs import Run
from a2c.tools.summary import OUT_OF_TIME, make_table, row_of, show_score, summarise, write_csv

CONFIG = replace(Config.from_preset("cartpole"), keep_policy_every=100)


def run_of(seed=0, setting="gamma=0.9", **changes):
    return Run(setting, {"gamma": setting[6:]}, replace(CONFIG, seed=seed, **changes), ())


def write_run(out, run, scores=(500.0,) * 100, metrics="10,2,5,1\n20,4,9,2\n", evaluations=""):
    """A run with an episode of each score every 10 decisions and half a second."""
    run_dir = out / run.name
    run_dir.mkdir(parents=True)
    rows = [f"{10 * i},{i / 2},{score},9\n" for i, score in enumerate(scores)]
    (run_dir / "episodes.csv").write_text("env_steps,seconds,score,length\n" + "".join(rows))
    (run_dir / "metrics.csv").write_text("env_steps,seconds,updates,policy_lag\n" + metrics)
    if evaluations:
        (run_dir / "evaluations.csv").write_text("env_steps,mean\n" + evaluations)


def test_a_row_holds_the_setting_the_speeds_and_where_the_mean_of_a_hundred_reaches_the_target(tmp_path):
    run = run_of(3)
    write_run(tmp_path, run, [500] * 60 + [100] * 40 + [500] * 94, evaluations="100,400\n200,475\n")
    assert row_of(tmp_path, run, 0) == {
        "setting": "gamma=0.9",
        "gamma": "0.9",
        "seed": 3,
        "env_steps": 20,
        "seconds": 4.0,
        "steps_per_second": 5.0,
        "updates_per_second": 2.2,
        "best": 476.0,
        "last": 476.0,
        "steps_to_target": 10 * 193,
        "seconds_to_target": 193 / 2,
        "frozen_steps_to_target": 200,
        "policy_lag": 1.5,
        "exit_status": 0,
    }


@pytest.mark.parametrize("row", ["", "10,0,5,1\n", "inf,3,5,1\n", "0,3,5,1\n", "10,3,,1\n", "10,nan,5,1\n"])
def test_metrics_without_a_finite_row_are_refused_unless_the_run_has_failed(row, tmp_path):
    write_run(tmp_path, run_of(), metrics=row)
    with pytest.raises(ValueError, match=r"metrics\.csv must have a row with finite numbers above 0"):
        row_of(tmp_path, run_of(), 0)
    row = row_of(tmp_path, run_of(), 3)
    assert (row["exit_status"], row["env_steps"], row["steps_to_target"]) == (3, "", "")


def test_a_run_that_failed_before_it_wrote_anything_has_a_row(tmp_path):
    row = row_of(tmp_path, run_of(7), 1)
    assert (row["setting"], row["seed"], row["exit_status"]) == ("gamma=0.9", 7, 1)
    assert list(row) == list(empty_row())


def empty_row():
    columns = "setting gamma seed env_steps seconds steps_per_second updates_per_second best last steps_to_target"
    return dict.fromkeys(f"{columns} seconds_to_target frozen_steps_to_target policy_lag exit_status".split(), "")


def test_a_run_that_failed_shows_what_it_had_reached(tmp_path):
    write_run(tmp_path, run_of(), [100.0] * 120)
    row = row_of(tmp_path, run_of(), 1)
    assert (row["env_steps"], row["best"], row["steps_to_target"], row["exit_status"]) == (20, 100.0, "", 1)


def test_rows_that_are_not_finite_are_left_out(tmp_path):
    write_run(tmp_path, run_of(), metrics="10,2,5,1\ninf,3,5,1\n")
    with open(tmp_path / run_of().name / "episodes.csv", "w") as file:
        file.write("env_steps,seconds,score,length\n" + "inf,1,500,9\n10,nan,500,9\n" + "20,2,500,9\n" * 100)
    row = row_of(tmp_path, run_of(), 0)
    assert (row["env_steps"], row["steps_per_second"]) == (10, 5.0)
    assert (row["steps_to_target"], row["seconds_to_target"]) == (20, 2.0)


def rows_of(runs, steps, frozen=None, codes=None):
    """Rows of runs that reached the target after `steps` decisions, "" for a miss."""
    return [
        empty_row()
        | {"setting": run.setting, "best": 480.0, "last": 470.0}
        | {"steps_to_target": at, "seconds_to_target": at and at / 100}
        | {"frozen_steps_to_target": still, "exit_status": code}
        for run, at, still, code in zip(runs, steps, frozen or steps, codes or [0] * len(runs), strict=True)
    ]


def test_a_setting_counts_every_seed_and_a_miss_is_longer_than_any_other():
    runs = [run_of(seed) for seed in range(5)]
    (row,) = summarise(runs, rows_of(runs, [300, "", 100, 200, ""], [50, 60, "", "", ""], [0, 137, 0, 0, 0]))
    assert (row["runs"], row["failed"], row["solved"], row["frozen_solved"]) == (5, 1, 3, 2)
    assert (row["median_steps_to_target"], row["worst_steps_to_target"]) == (300, np.inf)
    assert (row["low_steps_to_target"], row["high_steps_to_target"]) == (100, np.inf)
    assert row["median_seconds_to_target"] == 3.0
    assert (row["median_frozen_steps_to_target"], row["low_frozen_steps_to_target"]) == (np.inf, 50)


def test_the_budget_of_runs_that_ran_out_of_time_is_what_those_that_had_begun_have_made():
    runs = [run_of(seed) for seed in range(3)]
    rows = rows_of(runs, ["", "", ""], codes=[OUT_OF_TIME] * 3)
    for row, made in zip(rows, (1200, 1300, ""), strict=True):
        row["env_steps"] = made
    (row,) = summarise(runs, rows)
    assert (row["budget"], row["solved"], row["failed"]) == (1200, 0, 0) and "> 1,200" in printed([row])
    (row,) = summarise(runs[2:], rows[2:])
    assert row["budget"] == 0 and "not trained" in printed([row])


def test_an_interval_holds_the_median_and_is_narrow_for_runs_that_agree():
    runs = [run_of(seed) for seed in range(20)]
    (row,) = summarise(runs, rows_of(runs, list(range(1000, 1020))))
    assert 1000 < row["low_steps_to_target"] < row["median_steps_to_target"] < row["high_steps_to_target"] < 1019


@pytest.mark.parametrize(
    ("bests", "median", "shown"),
    [
        ([-1.0, 0.0, 7.0], 0.0, "0.0"),
        ([0.0, "", 7.0], 0.0, "0.0"),  # "": a run that failed before its 100th episode
        ([5.0, "", "", 7.0], "", "-"),
        (["", ""], "", "-"),
    ],
)
def test_a_run_without_a_mean_of_a_hundred_is_in_the_median_as_the_worst(bests, median, shown):
    runs = [run_of(seed, target_score=None) for seed in range(len(bests))]
    rows = [row | {"best": best} for row, best in zip(rows_of(runs, [""] * len(runs)), bests, strict=True)]
    (summary,) = summarise(runs, rows)
    assert summary["median_best"] == median
    assert make_table([summary]).columns[-1]._cells == [shown] and show_score(median) == shown


def test_settings_are_summarised_apart_and_figures_without_target_are_empty():
    runs = [run_of(0), run_of(0, "gamma=0.5", target_score=None), run_of(1), run_of(0, "gamma=0", keep_policy_every=0)]
    with_target, without, not_kept = summarise(runs, rows_of(runs, [100, "", 300, 500]))
    assert (with_target["runs"], with_target["median_steps_to_target"], with_target["gamma"]) == (2, 200, "0.9")
    assert (without["target"], without["solved"], without["median_steps_to_target"]) == ("", "", "")
    assert without["median_frozen_steps_to_target"] == "" and without["median_best"] == 480.0
    assert not_kept["median_steps_to_target"] == 500 and not_kept["median_frozen_steps_to_target"] == ""


def printed(summaries, width=200):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(make_table(summaries))
    return console.export_text()


def test_the_printed_table_shows_a_miss_as_more_than_the_budget_and_leaves_empty_columns_out():
    runs = [run_of(seed, total_env_steps=5000, keep_policy_every=0) for seed in range(3)]
    text = printed(summarise(runs, rows_of(runs, [1000, "", 2000])))
    assert "2 of 3" in text and "2,000" in text and "1,000 to > 5,000" in text and "0:00:20" in text
    assert "frozen" not in text and "failed" not in text
    stopped = [replace(run, config=replace(run.config, stop_after=4000)) for run in runs]
    text = printed(summarise(stopped, rows_of(stopped, ["", "", ""], codes=[1, 0, 0])))
    assert "0 of 3" in text and "> 4,000" in text and "failed" in text


def test_the_printed_table_shows_the_last_mean_where_runs_stopped_at_different_decisions_or_early():
    runs = [run_of(0, total_env_steps=5000), run_of(0, "gamma=0.5", total_env_steps=5000)]
    rows = rows_of(runs, [1000, 2000])
    assert "last mean" not in printed(summarise(runs, rows))
    runs[1] = replace(runs[1], config=replace(runs[1].config, stop_after=2500))
    text = printed(summarise(runs, rows))
    assert "last mean" in text and "470.0" in text and "5,000" in text and "2,500" in text
    text = printed(summarise(runs[:1], [rows[0] | {"best": "", "last": 30.0}]))
    assert "last mean" in text and "30.0" in text and "per run" not in text


def test_the_printed_table_of_millions_of_decisions_needs_100_columns():
    runs = [run_of(seed, "gamma=0.9,rollout_steps=20", total_env_steps=9_000_000) for seed in range(5)]
    runs = [replace(run, config=replace(run.config, keep_policy_every=0)) for run in runs]
    summaries = summarise(runs, rows_of(runs, [1_100_000, 1_200_000, 1_300_000, "", ""]))
    assert printed(summaries, 100).replace(" ", "") == printed(summaries).replace(" ", "")


def test_a_written_table_reads_back(tmp_path):
    write_csv(tmp_path / "x.csv", [{"a": 3.0, "b": np.inf, "c": "", "d": "x,y", "e": 0.5}])
    with open(tmp_path / "x.csv", newline="") as file:
        assert list(csv.DictReader(file)) == [{"a": "3", "b": "inf", "c": "", "d": "x,y", "e": "0.5"}]

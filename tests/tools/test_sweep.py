"""`a2c sweep`: who is trained for how long, who goes on, what a budget ends, what is refused."""

import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import fake_train
import pytest
from disks import FULL
from runs import rows
from toys import wait_for

from a2c.cli import commands as cli
from a2c.config.config import Config
from a2c.run.checkpoint import load_checkpoint
from a2c.tools.jobs import Jobs
from a2c.tools.runs import Run
from a2c.tools.summary import OUT_OF_TIME
from a2c.tools.sweep import Round, _as_trained, by_result, parse_budget, plan, sweep, until

FAKE = [sys.executable, fake_train.__file__]
CONFIG = replace(Config.from_preset("cartpole"), threads=1, total_env_steps=8192)  # rollouts of 512
TINY = ["--preset", "cartpole", "--num-envs", "4", "--total-env-steps", "4096", "--log-every", "0.2", "--no-progress"]


def runs(settings, seeds=1, **changes):
    return [
        Run(f"gamma={i}", {"gamma": str(i)}, replace(CONFIG, seed=seed, **changes), ("--do", "end"))
        for seed in range(seeds)
        for i in range(settings)
    ]


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        (None, (None, float("inf"))),
        ("5e6", (5e6, float("inf"))),
        ("250000", (250_000, float("inf"))),
        ("2h", (None, 7200)),
        ("1.5h", (None, 5400)),
        ("90m", (None, 5400)),
        ("30s", (None, 30)),
    ],
)
def test_a_budget_is_decisions_or_a_time(text, budget):
    assert parse_budget(text) == budget


def test_without_a_budget_each_round_is_twice_as_long_as_the_one_before_and_has_half_of_the_settings():
    assert plan(runs(8), None) == [Round(8, 0.25, float("inf")), Round(4, 0.5, float("inf")), Round(2, 1, float("inf"))]
    assert [one.settings for one in plan(runs(5), None)] == [5, 3, 2]
    assert [until(runs(1)[0], one).config.stop_after for one in plan(runs(8), None)] == [2048, 4096, 8192]


@pytest.mark.parametrize(("settings", "seeds", "budget"), [(8, 1, 20_000), (8, 3, 41_111), (5, 2, 25_000), (2, 1, 9e9)])
def test_all_runs_together_have_no_more_decisions_than_the_budget(settings, seeds, budget):
    rounds, spent = plan(runs(settings, seeds), budget), 0
    for one, before in zip(rounds, [0, *rounds], strict=False):
        stop = until(runs(1)[0], one).config.stop_after
        assert stop % 512 == 0 and stop <= 8192
        spent += one.settings * seeds * (stop - (until(runs(1)[0], before).config.stop_after if before else 0))
    assert spent <= budget and (spent > 0.7 * budget or stop == 8192)


def test_the_flags_of_a_run_name_its_stop():
    (run,) = runs(1)
    assert until(run, Round(1, 0.5, 1000)).flags == ("--do", "end", "--stop-after", "512")


@pytest.fixture
def scores():
    """Trainings that write the score of their setting, by the number in its name."""

    def with_scores(*points):
        code = (
            f"import sys; sys.path.insert(0, {fake_train.__file__.rpartition('/')[0]!r}); import fake_train, re\n"
            f"write, points = fake_train.write, {points}\n"
            "number = int(re.search(r'gamma=(\\d+)', ' '.join(sys.argv))[1])\n"
            "fake_train.write = lambda run_dir, _: write(run_dir, points[number])\n"
            "fake_train.main(sys.argv[1:])"
        )
        return [sys.executable, "-c", code]

    return with_scores


def test_the_better_half_goes_on_and_the_table_begins_with_the_best(tmp_path, scores, capfd):
    assert sweep(tmp_path, runs(4, 2), scores(10, 40, 20, 30), 2, "a2c sweep", None) == 0
    printed = capfd.readouterr().out
    assert "round 1 of 2: 4 settings, 8 runs, to 4,096 decisions" in printed
    assert "round 2 of 2: 2 settings, 4 runs, to 8,192 decisions" in printed
    summary = rows(tmp_path / "summary.csv")
    assert [(row["setting"], row["budget"], row["runs"]) for row in summary] == [
        ("gamma=1", "8192", "2"),
        ("gamma=3", "8192", "2"),
        ("gamma=2", "4096", "2"),
        ("gamma=0", "4096", "2"),
    ]
    assert len(rows(tmp_path / "compare.csv")) == 8
    assert "--resume" in (tmp_path / "gamma=1/seed-0.log").read_text()
    assert "--resume" not in (tmp_path / "gamma=0/seed-0.log").read_text()


def test_a_sweep_repeated_starts_no_process(tmp_path, scores, capfd):
    assert sweep(tmp_path, runs(4), scores(10, 40, 20, 30), 2, "a2c sweep", None) == 0
    before = rows(tmp_path / "summary.csv")
    capfd.readouterr()
    assert sweep(tmp_path, runs(4), ["/no/such/program"], 2, "a2c sweep", None) == 0
    assert "begin" not in capfd.readouterr().out and rows(tmp_path / "summary.csv") == before


def test_a_run_that_an_earlier_sweep_has_trained_further_is_shown_as_it_is(tmp_path, scores):
    assert sweep(tmp_path, runs(4), scores(10, 40, 20, 30), 2, "a2c sweep", None) == 0
    assert sweep(tmp_path, runs(4), scores(10, 40, 20, 30), 2, "a2c sweep", "9000") == 0  # 1,024 and 3,072
    summary = {row["setting"]: row["budget"] for row in rows(tmp_path / "summary.csv")}
    assert summary == {"gamma=1": "8192", "gamma=3": "8192", "gamma=2": "4096", "gamma=0": "4096"}


@pytest.mark.parametrize(("stopped", "budget"), [(0, 8192), (2048, 4096), (6144, 6144)])
def test_a_run_that_compare_has_trained_to_the_end_is_shown_with_its_whole_budget(stopped, budget):
    (run,) = runs(1, total_env_steps=8192, stop_after=4096)
    assert _as_trained(run, stopped).budget == budget


@pytest.mark.parametrize("tried", [False, True])
def test_a_failure_counts_where_the_time_ends_before_the_run_is_tried_again(tried, tmp_path, monkeypatch):
    grid = [replace(run, flags=("--do", "fail" if run.config.seed == 0 else "end")) for run in runs(4, 3)]
    train_all, rounds = Jobs.train_all, []

    def one_round(self, todo, jobs):
        rounds.append(todo)
        if len(rounds) == 2 and tried:  # two runs that have failed begin again, and are stopped
            todo, self.deadline = [replace(run, flags=("--do", "wait")) for run in todo], time.monotonic()
        elif len(rounds) == 2:
            self.request.handle(signal.SIGALRM, None)  # the time ends before a run of the second round begins
        train_all(self, todo, jobs)

    monkeypatch.setattr(Jobs, "train_all", one_round)
    assert sweep(tmp_path, grid, FAKE, 2, "a2c sweep", "2h") == 1
    assert len(rounds) == 2
    codes = [row["exit_status"] for row in rows(tmp_path / "compare.csv") if row["seed"] == "0"]
    assert codes == (["124", "124", "1", "1"] if tried else ["1"] * 4)


def test_a_setting_whose_runs_fail_is_the_last_and_counted(tmp_path, capfd):
    grid = [replace(run, flags=("--do", "fail")) if run.setting == "gamma=0" else run for run in runs(2)]
    assert sweep(tmp_path, grid, FAKE, 2, "a2c sweep", None) == 1
    assert [(row["setting"], row["failed"]) for row in rows(tmp_path / "summary.csv")] == [
        ("gamma=1", "0"),
        ("gamma=0", "1"),
    ]
    assert "gamma=0/seed-0 failed with exit status 1" in " ".join(capfd.readouterr().out.split())


def test_a_budget_of_time_ends_a_sweep_with_the_results_so_far(tmp_path, capfd, monkeypatch):
    grid = [replace(run, flags=("--do", "wait")) if run.setting == "gamma=0" else run for run in runs(2)]
    train_all, began = Jobs.train_all, time.monotonic()

    def one_round(self, todo, jobs):
        assert 7200 <= self.deadline - began < 7260

        def end():
            wait_for(lambda: "gamma=1/seed-0" in self.codes and (tmp_path / "gamma=0/seed-0/latest.pt").exists())
            self.deadline = time.monotonic()

        threading.Thread(target=end).start()
        train_all(self, todo, jobs)

    monkeypatch.setattr(Jobs, "train_all", one_round)
    assert sweep(tmp_path, grid, FAKE, 2, "a2c sweep", "2h") == 0
    printed = capfd.readouterr().out
    assert "the budget of 2h is used up in round 1; the same command continues" in printed and "failed" not in printed
    assert {row["setting"]: row["exit_status"] for row in rows(tmp_path / "compare.csv")} == {
        "gamma=0": "124",
        "gamma=1": "0",
    }
    # The budget of the run that was stopped is what it had made; it reached its target before that.
    assert {row["setting"]: row["budget"] for row in rows(tmp_path / "summary.csv")} == {
        "gamma=0": "1200",
        "gamma=1": "8192",
    }


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "vary must make 2 settings or more, got 1"),
        (
            ["--vary", "gamma=0.9,0.98", "--budget", "2 days"],
            "budget must be decisions such as 5e6, or a time such as 90m",
        ),
        (["--vary", "gamma=0.9,0.98", "--budget", "0"], "budget must be decisions"),
        (
            ["--vary", "gamma=0.9,0.98", "--budget", "100"],
            "budget must give each run a rollout of 128 decisions, got 50",
        ),
        (["--vary", "gamma=0.9,0.98", "--stop-after", "100"], "stop_after must be left out of a sweep: use --budget"),
        (["--vary", "gamma=0.9,0.98", "--seed", "1"], "seed must be left out"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line(args, part, tmp_path, capsys):
    assert cli.main(["sweep", str(tmp_path / "out"), *TINY, *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and part in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_runs_of_a_sweep_are_trained_to_where_their_round_ends(tmp_path, capfd):
    flags = [*TINY, "--vary", "gamma=0.5,0.9,0.98", "--budget", "8e3", "--jobs", "2"]
    assert cli.main(["sweep", str(tmp_path / "out"), *flags]) == 0
    summary = rows(tmp_path / "out/summary.csv")
    steps = [load_checkpoint(tmp_path / f"out/{row['setting']}/seed-0/latest.pt")["env_steps"] for row in summary]
    assert steps == [int(row["budget"]) for row in summary] and steps[0] == steps[1] > steps[2]
    assert sum(steps) <= 8000 and "round 2 of 2" in capfd.readouterr().out


def test_a_setting_with_few_long_episodes_is_not_behind_one_with_many_short_ones(tmp_path):
    first, second = runs(2)
    for run, score, episodes in ((first, 20, 200), (second, 400, 30)):
        (tmp_path / run.name).mkdir(parents=True)
        fake_train.write(tmp_path / run.name, score, episodes)
    assert by_result(tmp_path, [first, second], {first.name: 0, second.name: 0}) == ["gamma=1", "gamma=0"]


@pytest.mark.parametrize(("code", "order"), [(137, ["gamma=1", "gamma=0"]), (OUT_OF_TIME, ["gamma=0", "gamma=1"])])
def test_a_setting_whose_run_failed_is_the_last_though_its_scores_are_higher(code, order, tmp_path):
    first, second = runs(2)
    for run, score in ((first, 400), (second, 20)):
        (tmp_path / run.name).mkdir(parents=True)
        fake_train.write(tmp_path / run.name, score)
    assert by_result(tmp_path, [first, second], {first.name: code, second.name: 0}) == order


def test_episodes_of_the_rollout_that_reaches_the_budget_count(tmp_path):
    first, second = runs(2, total_env_steps=900)
    for run, score in ((first, 470), (second, 474)):
        (tmp_path / run.name).mkdir(parents=True)
        fake_train.write(tmp_path / run.name, score, 90)
    with open(tmp_path / first.name / "episodes.csv", "a") as file:
        file.write("1024,60,500,10\n" * 30)  # the target, 475, at the end of the second rollout of 512
    assert by_result(tmp_path, [first, second], {first.name: 0, second.name: 0}) == ["gamma=0", "gamma=1"]


def test_a_sweep_goes_on_where_its_lines_cannot_be_written(tmp_path, scores, monkeypatch):
    monkeypatch.setattr("a2c.tools.sweep.report", lambda *_: None)  # the table is what the command is for
    with open(FULL, "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert sweep(tmp_path, runs(4), scores(10, 40, 20, 30), 2, "a2c sweep", None) == 0
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
    assert "--resume" in (tmp_path / "gamma=1/seed-0.log").read_text()

"""`a2c compare` from its command line to its tables; a comparison that was stopped can be continued."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import fake_train
import psutil
import pytest
from runs import rows
from toys import has_rows, wait_for

from a2c.cli import commands as cli
from a2c.cli.flags import parse_command
from a2c.cli.grid import make_runs
from a2c.config.config import MAY_CHANGE, Config
from a2c.metrics.text import format_duration
from a2c.run import about
from a2c.run.checkpoint import load_checkpoint
from a2c.run.policies import kept_policies
from a2c.run.run_dir import RunLock
from a2c.tools.compare import compare
from a2c.tools.evaluate import evaluate
from a2c.tools.runs import Run

TINY = ["--preset", "cartpole", "--num-envs", "4", "--total-env-steps", "3000", "--log-every", "0.2", "--no-progress"]
KEPT = [*TINY, "--keep-policy-every", "1500"]
SETTINGS = ["gamma=0.9", "gamma=0.98"]
FAKE = [sys.executable, fake_train.__file__]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A finished comparison of two settings, trained side by side."""
    out = tmp_path_factory.mktemp("compare") / "out"
    assert cli.main(["compare", str(out), *KEPT, "--vary", "gamma=0.9,0.98", "--seeds", "3", "--jobs", "2"]) == 0
    return out


def copy_of(out, tmp_path):
    return shutil.copytree(out, tmp_path / "out")


def test_compare_writes_a_run_per_setting_and_seed_tables_a_picture_and_what_made_them(out):
    tables = {"about.json", "status.json", "lock", "compare.csv", "summary.csv", "compare.png"}
    assert {path.name for path in out.iterdir()} == {*SETTINGS, *tables}
    assert {path.name for path in (out / "gamma=0.9").iterdir()} == {"seed-3", "seed-3.log"}
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    facts = json.loads((out / "about.json").read_text())
    assert facts["command"].startswith(f"a2c compare {out} --preset cartpole") and facts["jobs"] == 2
    assert [row["setting"] for row in rows(out / "summary.csv")] == SETTINGS


def test_compare_csv_has_the_figures_of_every_run(out):
    for setting, row in zip(SETTINGS, rows(out / "compare.csv"), strict=True):
        state = load_checkpoint(out / setting / "seed-3" / "latest.pt")
        assert (row["setting"], row["gamma"], row["seed"]) == (setting, setting[6:], "3")
        assert int(row["env_steps"]) == state["env_steps"] >= 3000
        seconds = float(row["seconds"])
        for count, speed in (("env_steps", row["steps_per_second"]), ("updates", row["updates_per_second"])):
            shortest, longest = ((seconds + off) * (float(speed) + off) for off in (-0.0501, 0.0501))
            assert shortest < state[count] < longest  # the table rounds both to a tenth
        assert json.loads(state["config"])["gamma"] == float(setting[6:])
        assert row["steps_to_target"] == "" and row["exit_status"] == "0"  # no run reaches 475 in so short a time
        assert float(row["policy_lag"]) == 1.5  # four batches: 0, 1, 2, 3


def test_the_kept_policies_of_every_run_are_evaluated_in_a_process_of_their_own(out):
    for setting in SETTINGS:
        run_dir = out / setting / "seed-3"
        table = rows(run_dir / "evaluations.csv")
        # The last one alone: no training episode reached the target.
        assert [(row["env_steps"], row["episodes"]) for row in table] == [("3072", "30")]
        scores = evaluate(run_dir, 30, checkpoint="policies/000003072.pt", threads=1)
        assert float(table[0]["mean"]) == scores.mean() and float(table[0]["max"]) == scores.max()
        log = (out / setting / "seed-3.log").read_text()
        assert log.index("run directory") < log.index("--- evaluate") < log.index("policy of 3,072 env_steps")


def test_compare_prints_lines_and_a_table_but_nothing_of_its_runs(out, tmp_path, capfd):
    copy = copy_of(out, tmp_path)
    shutil.rmtree(copy / "gamma=0.9/seed-3")
    assert cli.main(["compare", str(copy), *TINY, "--vary", "gamma=0.9", "--seeds", "3"]) == 0
    printed, err = capfd.readouterr()
    first, second, *table = printed.splitlines()
    assert err == "" and first == "begin  gamma=0.9 seed 3"
    took = format_duration(float(rows(copy / "compare.csv")[0]["seconds"]))
    assert second.startswith(f"end    gamma=0.9 seed 3: 3,072 decisions in {took}, 475 missed")
    assert "> 3,000" in printed and "0 of 1" in printed and len(table) < 10
    assert "--resume" not in (copy / "gamma=0.9/seed-3.log").read_text().rpartition("--- a2c train")[2]


def test_compare_repeated_starts_no_process_and_changes_no_run(out, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("no process is needed"))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "compare.png"}
    assert cli.main(["compare", str(out), *KEPT, "--vary", "gamma=0.9,0.98", "--seeds", "3"]) == 0
    assert {path: path.read_bytes() for path in before} == before  # about.json, too: nothing was added
    assert "begin" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gae-lambda", "0.5"], "gae_lambda must be 0.95"),
        (["--network", "lstm"], "network must be mlp"),
        (["--precision", "bfloat16"], "precision must be float32"),
        (["--log-eps", "0.1"], "log_eps must be 0.0"),
        (["--lstm-units", "3"], "lstm_units must be 16"),
        (["--target-score", "200"], "target_score must be 475.0"),
        (["--threads", "2"], "threads must be 1"),
        (["--total-env-steps", "9000"], "total_env_steps must be 3000"),
        (["--keep-policy-every", "0"], "keep_policy_every must be 1500"),
    ],
)
def test_compare_refuses_flags_other_than_those_of_existing_runs(flags, said, out, capsys):
    assert cli.main(["compare", str(out), *KEPT, "--vary", "gamma=0.9", "--seeds", "3", *flags]) == 2
    err = capsys.readouterr().err
    assert f"{said} as in the run" in err and err.count("\n") == 1


def test_a_comparison_is_refused_if_a_run_was_trained_further_than_all_shall_be(out, tmp_path, capsys):
    copy = copy_of(out, tmp_path)  # 3,072 decisions of each run, in rollouts of 128
    command = ["compare", str(copy), *KEPT, "--vary", "gamma=0.9"]
    run_dir, status = copy / "gamma=0.9/seed-3", copy / "status.json"
    for text in (status.read_text(), "{}"):  # a run that was interrupted has no status
        status.write_text(text)
        assert cli.main([*command, "--seeds", "3,4", "--stop-after", "1000"]) == 2
        assert f"stop_after must be at least 3072, as {run_dir} has made, got 1000" in capsys.readouterr().err
        assert not (run_dir.parent / "seed-4").exists()
    shutil.copy(out / "status.json", status)
    assert cli.main([*command, "--seeds", "3", "--stop-after", "2900"]) == 0  # whole rollouts, and what had begun
    for _ in range(2):
        assert cli.main([*command, "--seeds", "3", "--stop-after", "9000"]) == 0  # beyond its end


def test_compare_accepts_flags_that_repeat_what_a_run_resolved(out):
    named = ["--network", "mlp", "--precision", "float32", "--lstm-units", "16", "--log-eps", "0"]
    assert cli.main(["compare", str(out), *KEPT, "--vary", "gamma=0.9,0.98", "--seeds", "3", *named]) == 0


def test_compare_lets_only_settings_differ_that_change_no_result():
    assert set(MAY_CHANGE) == {
        "run_dir",
        "resume",
        "stop_after",
        "progress",
        "log_every",
        "wandb",
        "eval_every",
        "eval_episodes",
    }


def test_compare_refuses_a_file_in_place_of_its_directory(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["compare", str(tmp_path / "file"), "--preset", "cartpole"]) == 2
    assert capsys.readouterr().err == f"error: out must be a directory, got '{tmp_path / 'file'}'\n"


@pytest.mark.parametrize("name", ["gamma=0.9", "gamma=0.9/seed-3", "gamma=0.9/seed-3.log"])
def test_compare_refuses_a_symbolic_link_in_place_of_what_it_writes(name, out, tmp_path, capsys):
    copy = copy_of(out, tmp_path)
    (copy / name).rename(tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "elsewhere").rglob("*")}
    assert cli.main(["compare", str(copy), *KEPT, "--vary", "gamma=0.9", "--seeds", "3"]) == 2
    err = capsys.readouterr().err
    assert f"{name} must not be a symbolic link" in err and err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "elsewhere").rglob("*")} == before


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "large"])
def test_compare_refuses_a_config_that_is_not_a_small_file(kind, out, tmp_path, capsys):
    copy = copy_of(out, tmp_path)
    path = copy / "gamma=0.9/seed-3/config.json"
    path.unlink()
    make = {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "directory": path.mkdir,
        "large": lambda: path.write_text(" " * 2_000_000),
    }
    make[kind]()
    assert cli.main(["compare", str(copy), *KEPT, "--vary", "gamma=0.9", "--seeds", "3"]) == 2
    err = capsys.readouterr().err
    assert "config.json must" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seed", "3"], "seed must be left out of a comparison"),
        (["--vary", "gamm=0.9"], "did you mean gamma"),
        (["--vary", "gamma=0.9,1.5"], "gamma must be at least 0.0 and at most 1.0, got 1.5"),
        (["--vary", "env=CartPole-v1,CartPol-v1"], "did you mean CartPole-v1"),
        (["--preset", "cartpole", "--vary", "network=mlp,nature"], "network must be mlp or lstm"),
        (["--preset", "cartpole", "--vary", "backend=sync,native"], "backend must be async or sync for CartPole-v1"),
    ],
)
def test_compare_refuses_what_cannot_be_run_before_anything_starts(flags, said, tmp_path, capsys):
    assert cli.main(["compare", str(tmp_path / "out"), *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err
    assert not (tmp_path / "out").exists()


def fakes(tmp_path, *todo, command="a2c compare"):
    """The exit code of a comparison of one setting, with a run that does each of `todo`."""
    config = replace(Config.from_preset("cartpole"), keep_policy_every=0)
    runs = [Run("x", {}, replace(config, seed=seed), ("--do", what)) for seed, what in enumerate(todo)]
    return compare(tmp_path, runs, FAKE, 2, command)


def test_a_run_that_fails_counts_as_a_miss_is_reported_and_tried_again(tmp_path, capfd):
    assert fakes(tmp_path, "end", "fail once", "end") == 1
    printed = " ".join(capfd.readouterr().out.split())
    log = tmp_path / "x/seed-1.log"
    assert (
        f"x/seed-1 failed with exit status 1: error: it is broken (see {log}); the same command retries it" in printed
    )
    (summary,) = rows(tmp_path / "summary.csv")
    assert [row["exit_status"] for row in rows(tmp_path / "compare.csv")] == ["0", "1", "0"]
    assert (summary["runs"], summary["failed"], summary["solved"]) == ("3", "1", "2")
    assert fakes(tmp_path, "end", "fail once", "end") == 0
    (summary,) = rows(tmp_path / "summary.csv")
    assert (summary["failed"], summary["solved"], summary["worst_steps_to_target"]) == ("0", "3", "1000")


def test_a_run_whose_tables_are_gone_counts_as_failed_and_the_others_have_results(tmp_path, capfd):
    assert fakes(tmp_path, "end", "end") == 0
    (tmp_path / "x/seed-0/episodes.csv").unlink()
    capfd.readouterr()
    assert fakes(tmp_path, "end", "end", "end") == 1
    assert "x/seed-0 has no results: [Errno 2] No such file" in " ".join(capfd.readouterr().out.split())
    assert [row["exit_status"] for row in rows(tmp_path / "compare.csv")] == ["1", "0", "0"]
    (summary,) = rows(tmp_path / "summary.csv")
    assert (summary["runs"], summary["failed"], summary["solved"]) == ("3", "1", "2")
    shutil.rmtree(tmp_path / "x/seed-0")
    assert fakes(tmp_path, "end", "end", "end") == 0


def test_about_lists_the_commits_of_a_comparison_that_another_one_continues(tmp_path, monkeypatch):
    for commit, count in (("aaaaaaa", 1), ("aaaaaaa", 2), ("bbbbbbb+", 3), ("ccccccc", 3)):
        monkeypatch.setattr(about, "_commit", lambda commit=commit: commit)
        assert fakes(tmp_path, *["end"] * count, command=f"a2c compare {count}") == 0
    facts = json.loads((tmp_path / "about.json").read_text())
    assert facts["commit"] == ["aaaaaaa", "bbbbbbb+"]  # nothing was left to train for the last
    assert facts["command"] == ["a2c compare 1", "a2c compare 2", "a2c compare 3"]


def test_a_directory_that_cannot_be_used_is_refused_by_the_name_of_its_option(tmp_path):
    (tmp_path / "lock").symlink_to("elsewhere")
    with pytest.raises(ValueError, match=r"out must be a directory that can be written, got .*lock must not be a link"):
        fakes(tmp_path, "end")


def test_the_directory_of_a_run_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="out must not be the directory of a run, got"):
        fakes(tmp_path, "end")


def test_a_second_comparison_in_the_same_directory_is_refused(tmp_path):
    lock = RunLock(tmp_path)
    lock.take()
    with pytest.raises(ValueError, match="out must not be in use by another process"):
        fakes(tmp_path, "end")
    lock.release()
    assert fakes(tmp_path, "end") == 0


def test_a_comparison_in_which_every_run_fails_at_once_still_has_its_tables(tmp_path):
    options, flags = parse_command(["compare", "out", *TINY, "--vary", "gamma=0.9,0.5"])
    assert compare(tmp_path, make_runs(options, flags), ["/no/such/program"], 1, "a2c compare") == 1
    assert [(row["setting"], row["exit_status"], row["env_steps"]) for row in rows(tmp_path / "compare.csv")] == [
        ("gamma=0.9", "1", ""),
        ("gamma=0.5", "1", ""),
    ]
    assert {row["median_steps_to_target"] for row in rows(tmp_path / "summary.csv")} == {"inf"}


@pytest.mark.slow
def test_compare_continues_its_runs_to_a_later_stop(tmp_path):
    run_dir = tmp_path / "out/cartpole/seed-0"
    assert cli.main(["train", *TINY, "--stop-after", "1024", "--run-dir", str(run_dir)]) == 0  # rollouts of 128
    assert cli.main(["train", "--resume", str(run_dir), "--stop-after", "1024"]) == 0  # what a comparison calls
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] == 1024
    assert cli.main(["compare", str(tmp_path / "out"), *TINY, "--stop-after", "2048"]) == 0
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] == 2048
    assert rows(tmp_path / "out/summary.csv")[0]["budget"] == "2048"


LONG = [*TINY, "--total-env-steps", "60000", "--target-score", "1000", "--keep-policy-every", "20000", "--jobs", "2"]


def rows_logged(out):
    """How many rows metrics.csv has in each of the two runs."""
    tables = [out / setting / "seed-0/metrics.csv" for setting in SETTINGS]
    return [len(rows(table)) if table.exists() else 0 for table in tables]


def started(out, *flags):
    command = [sys.executable, "-m", "a2c", "compare", str(out), *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.slow
def test_a_parallel_comparison_stops_at_signals_and_the_same_command_finishes_it(tmp_path):
    flags, out = [*LONG, "--vary", "gamma=0.9,0.98"], tmp_path / "out"
    stops = [[0, 0]]
    for sign in (signal.SIGINT, signal.SIGTERM):
        known = rows_logged(out)
        run = started(out, *flags)
        wait_for(lambda known=known: all(n > old + 1 for n, old in zip(rows_logged(out), known, strict=True)), 120)
        # A terminal sends Ctrl-C to the whole group, a scheduler its SIGTERM to the first process alone.
        os.killpg(run.pid, sign) if sign == signal.SIGINT else os.kill(run.pid, sign)
        printed, _ = run.communicate(timeout=60)
        assert run.returncode == 128 + sign and "Traceback" not in printed and "the same command continues" in printed
        steps = [load_checkpoint(out / setting / "seed-0/latest.pt")["env_steps"] for setting in SETTINGS]
        assert all(earlier < count < 60_000 for earlier, count in zip(stops[-1], steps, strict=True))
        assert not (out / "compare.csv").exists()
        stops.append(steps)
    again = started(out, *flags)
    printed, _ = again.communicate(timeout=300)
    assert again.returncode == 0, printed
    for setting, row, *stopped in zip(SETTINGS, rows(out / "compare.csv"), *stops[1:], strict=True):
        assert row["exit_status"] == "0" and int(row["env_steps"]) >= 60_000
        log = (out / setting / "seed-0.log").read_text()
        assert all(f"resumed at {count:,} env_steps" in log for count in stopped)
        assert [steps // 20_000 for steps in kept_policies(out / setting / "seed-0")] == [1, 2, 3]
        played = [int(row["env_steps"]) // 20_000 for row in rows(out / setting / "seed-0/evaluations.csv")]
        assert played == [3]  # the last one: no training episode reaches 475


@pytest.mark.slow
def test_compare_when_killed_stops_its_runs_and_can_be_started_again_at_once(tmp_path):
    flags = [*LONG, "--total-env-steps", "100000000", "--vary", "gamma=0.9,0.98", "--backend", "async"]
    comparison, out = started(tmp_path / "out", *flags), tmp_path / "out"
    wait_for(lambda: all(has_rows(out / setting / "seed-0/metrics.csv") for setting in SETTINGS), 180)
    family = psutil.Process(comparison.pid).children(recursive=True)
    assert len(family) >= 6
    comparison.kill()
    comparison.communicate()
    again = started(out, *flags)
    assert not psutil.wait_procs(family, timeout=60)[1]
    for setting in SETTINGS:
        assert load_checkpoint(out / setting / "seed-0/latest.pt")["env_steps"] > 0  # it has finished its rollout
        wait_for(lambda name=setting: "resumed at" in (out / name / "seed-0.log").read_text(), 120)
    again.terminate()
    printed, _ = again.communicate(timeout=60)
    assert again.returncode == 128 + signal.SIGTERM and "failed" not in printed


def test_a_comparison_whose_picture_cannot_be_drawn_still_has_its_tables(tmp_path, monkeypatch, capfd):
    def draw(*_):
        raise RuntimeError("latex could not be found")

    monkeypatch.setattr("a2c.tools.compare.draw", draw)
    assert fakes(tmp_path, "end") == 0
    printed = capfd.readouterr()
    assert printed.err == "compare.png could not be drawn: latex could not be found\n" and "1 of 1" in printed.out
    assert rows(tmp_path / "summary.csv")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("a2c.tools.compare.draw", full)
    with pytest.raises(OSError, match="No space"):
        fakes(tmp_path, "end")


def test_a_run_of_another_version_is_refused_by_the_name_of_its_file(out, tmp_path, capsys):
    copy = copy_of(out, tmp_path)
    path = copy / "gamma=0.9/seed-3/config.json"
    for text in (json.dumps(json.loads(path.read_text()) | {"warmup_steps": 0}), ""):
        path.write_text(text)
        assert cli.main(["compare", str(copy), *KEPT, "--vary", "gamma=0.9", "--seeds", "3"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {path} is damaged or of another version of a2c (") and err.count("\n") == 1


def test_a_comparison_that_nobody_reads_keeps_its_exit_code(tmp_path):
    read, stdout = os.pipe()
    endless = ["--preset", "cartpole", "--total-env-steps", "100000000", "--target-score", "1000", "--log-every", "0.2"]
    command = [sys.executable, "-m", "a2c", "compare", str(tmp_path / "out"), *endless]
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True) as process:
        os.close(stdout)
        wait_for(lambda: has_rows(tmp_path / "out/cartpole/seed-0/metrics.csv"), 120)
        os.close(read)
        process.send_signal(signal.SIGINT)
        assert (process.stderr.read(), process.wait(60)) == ("", 128 + signal.SIGINT)

"""`a2c compare`: one table and one plot of several algorithms; a comparison that was stopped can be continued."""

import csv
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from toys import has_rows, wait_for

from a2c.cli import commands as cli
from a2c.run.checkpoint import load_checkpoint
from a2c.tools.compare import COLUMNS, FREE, report, summarise

TINY = ["--preset", "cartpole", "--num-envs", "4", "--total-env-steps", "3000", "--log-every", "0.2", "--no-progress"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A finished comparison of all three algorithms; it finds two of the runs finished already."""
    out = tmp_path_factory.mktemp("compare") / "out"
    for name in ("a3c", "ga3c"):  # in this process, whose workers start faster
        flags = [*TINY, "--algorithm", name, "--seed", "3", "--run-dir", str(out / f"{name}-3")]
        assert cli.main(["train", *flags]) == 0
    assert cli.main(["compare", str(out), *TINY, "--seeds", "3"]) == 0
    return out


def test_compare_writes_a_run_per_algorithm_a_table_and_a_plot(out):
    assert {path.name for path in out.iterdir()} == {"a2c-3", "a3c-3", "ga3c-3", "compare.csv", "compare.png"}
    with open(out / "compare.csv", newline="", encoding="utf-8") as file:
        rows = {row["algorithm"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["a2c", "a3c", "ga3c"] and list(rows["a2c"]) == list(COLUMNS)
    for name, row in rows.items():
        state = load_checkpoint(out / f"{name}-3" / "latest.pt")
        assert int(row["env_steps"]) == state["env_steps"] >= 3000
        seconds = pytest.approx(float(row["seconds"]), abs=0.051)  # a tenth is what the table shows
        assert state["env_steps"] / float(row["steps_per_second"]) == seconds
        assert state["updates"] / float(row["updates_per_second"]) == seconds
        assert row["steps_to_target"] == ""  # no run reaches 475 in so short a time
    assert float(rows["a2c"]["policy_lag"]) == 1.5  # four batches: 0, 1, 2, 3
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_compare_repeated_changes_no_finished_run(out, capfd):
    files = [out / "a2c-3" / file for file in ("latest.pt", "episodes.csv")]
    before = [path.read_bytes() for path in files]
    assert cli.main(["compare", str(out), *TINY, "--seeds", "3", "--algorithms", "a2c"]) == 0
    assert capfd.readouterr().out.count("finished already") == 1
    assert [path.read_bytes() for path in files] == before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gamma", "0.5"], "gamma must be 0.98"),
        (["--network", "lstm"], "network must be mlp"),
        (["--precision", "bfloat16"], "precision must be float32"),
        (["--log-eps", "0.1"], "log_eps must be 0.0"),
        (["--algorithms", "ga3c", "--log-eps", "0"], "log_eps must be 1e-06"),
        (["--lstm-units", "3"], "lstm_units must be 16"),
        (["--target-score", "200"], "target_score must be 475.0"),
        (["--total-env-steps", "9000"], "total_env_steps must be 3000"),
    ],
)
def test_compare_refuses_flags_other_than_those_of_existing_runs(flags, said, out, capsys):
    assert cli.main(["compare", str(out), *TINY, "--seeds", "3", *flags]) == 2
    err = capsys.readouterr().err
    assert f"{said} as in the run" in err and err.count("\n") == 1


def test_compare_accepts_flags_that_repeat_what_a_run_resolved(out, monkeypatch):
    monkeypatch.setattr("a2c.tools.compare.train_all", lambda *args: 0)  # it is finished
    named = [
        "--network",
        "mlp",
        "--precision",
        "float32",
        "--lstm-units",
        "16",
        "--algorithms",
        "a2c",
        "--log-eps",
        "0",
    ]
    assert cli.main(["compare", str(out), *TINY, "--seeds", "3", *named]) == 0


def test_compare_lets_only_settings_differ_that_change_no_result():
    assert set(FREE) == {"run_dir", "resume", "stop_after", "progress", "log_every"}


@pytest.mark.slow
def test_compare_continues_its_runs_to_a_later_stop(tmp_path):
    run_dir = tmp_path / "out" / "a2c-0"
    assert cli.main(["train", *TINY, "--stop-after", "1024", "--run-dir", str(run_dir)]) == 0  # rollouts of 128
    assert cli.main(["train", "--resume", str(run_dir), "--stop-after", "1024"]) == 0  # what a comparison calls
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] == 1024
    assert cli.main(["compare", str(tmp_path / "out"), *TINY, "--algorithms", "a2c", "--stop-after", "2048"]) == 0
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] == 2048


def test_summarise_finds_where_the_mean_of_a_hundred_episodes_reaches_the_target(out):
    rows = [("0", "1", str(score), "9") for score in [500] * 60 + [100] * 40 + [500] * 94]
    with open(out / "a2c-3" / "episodes.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["env_steps", "seconds", "score", "length"])
        writer.writerows([str(10 * i), f"{i / 2}", score, length] for i, (_, _, score, length) in enumerate(rows))
    (row,) = summarise(out, ["a2c"], [3])
    assert row["steps_to_target"] == 10 * 193 and row["seconds_to_target"] == 193 / 2  # mean 476 of the last 100
    assert row["best"] == 476.0
    report(out, [row])


def copy_of(out, tmp_path):
    return shutil.copytree(out / "a2c-3", tmp_path / "out" / "a2c-3").parent


@pytest.mark.parametrize("row", ["", "10,0,5,1\n", "inf,3,5,1\n", "0,3,5,1\n", "10,3,,1\n", "10,nan,5,1\n"])
def test_summarise_refuses_metrics_without_a_finite_row(row, out, tmp_path):
    copy = copy_of(out, tmp_path)
    (copy / "a2c-3" / "metrics.csv").write_text("env_steps,seconds,updates,policy_lag\n" + row)
    with pytest.raises(ValueError, match=r"metrics\.csv must have a row with finite numbers above 0"):
        summarise(copy, ["a2c"], [3])


def test_summarise_leaves_out_rows_that_are_not_finite(out, tmp_path):
    copy = copy_of(out, tmp_path)
    (copy / "a2c-3" / "metrics.csv").write_text("env_steps,seconds,updates,policy_lag\n10,2,5,1\ninf,3,5,1\n")
    with open(copy / "a2c-3" / "episodes.csv", "w", encoding="utf-8") as file:
        file.write("env_steps,seconds,score,length\n" + "inf,1,500,9\n10,nan,500,9\n" + "20,2,500,9\n" * 100)
    (row,) = summarise(copy, ["a2c"], [3])
    assert row["env_steps"] == 10 and row["steps_per_second"] == 5.0
    assert row["steps_to_target"] == 20 and row["seconds_to_target"] == 2.0
    report(copy, [row])


def test_compare_refuses_a_symbolic_link_in_place_of_a_run(out, tmp_path, capsys):
    copy = copy_of(out, tmp_path)
    (copy / "a2c-3").rename(tmp_path / "elsewhere")
    (copy / "a2c-3").symlink_to(tmp_path / "elsewhere")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "elsewhere").rglob("*")}
    assert cli.main(["compare", str(copy), *TINY, "--seeds", "3", "--algorithms", "a2c"]) == 2
    err = capsys.readouterr().err
    assert "a2c-3 must not be a symbolic link" in err and err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "elsewhere").rglob("*")} == before


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "large"])
def test_compare_refuses_a_config_that_is_not_a_small_file(kind, out, tmp_path, capsys):
    copy = copy_of(out, tmp_path)
    path = copy / "a2c-3" / "config.json"
    path.unlink()
    make = {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "directory": path.mkdir,
        "large": lambda: path.write_text(" " * 2_000_000),
    }
    make[kind]()
    assert cli.main(["compare", str(copy), *TINY, "--seeds", "3", "--algorithms", "a2c"]) == 2
    err = capsys.readouterr().err
    assert "config.json must" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seed", "3"], "seed must be left out of a comparison, got 3"),
        (["--run-dir", "x"], "run-dir must be left out of a comparison, got x"),
        (["--algorithm", "a2c"], "algorithm must be left out"),
        (["--num-evns", "3"], "did you mean --num-envs"),
        (["--gamma", "2"], "gamma must be at least 0.0 and at most 1.0, got 2"),
        (["--seeds", "-1"], "seed must be at least 0"),
        (["--algorithms", "a4c"], "a4c"),
        (["--algorithms"], "algorithms must be one or more different values"),
        (["--seeds", "0", "0"], "seeds must be one or more different values, got '0 0'"),
    ],
)
def test_compare_refuses_bad_flags_before_anything_is_trained(flags, said, tmp_path, capsys):
    assert cli.main(["compare", str(tmp_path / "out"), *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_compare_stops_at_a_signal_together_with_its_run(sign, tmp_path):
    flags = [*TINY, "--total-env-steps", "1000000", "--algorithms", "a2c"]
    command = [sys.executable, "-m", "a2c", "compare", str(tmp_path / "out"), *flags]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    wait_for(lambda: has_rows(tmp_path / "out" / "a2c-0" / "metrics.csv"), 60)
    # A terminal sends Ctrl-C to the whole group, a scheduler its SIGTERM to the first process alone.
    os.killpg(run.pid, sign) if sign == signal.SIGINT else os.kill(run.pid, sign)
    out, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + sign and "Traceback" not in out
    steps = load_checkpoint(tmp_path / "out" / "a2c-0" / "latest.pt")["env_steps"]
    assert 0 < steps < 1_000_000


@pytest.mark.slow
def test_compare_when_killed_stops_its_run(tmp_path):
    flags = [*TINY, "--total-env-steps", "100000000", "--target-score", "1000", "--algorithms", "a2c"]
    flags += ["--backend", "async"]
    command = [sys.executable, "-m", "a2c", "compare", str(tmp_path / "out"), *flags]
    comparison = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: has_rows(tmp_path / "out" / "a2c-0" / "metrics.csv"), 120)
    family = psutil.Process(comparison.pid).children(recursive=True)
    assert len(family) >= 3
    comparison.kill()
    comparison.wait()
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert load_checkpoint(tmp_path / "out" / "a2c-0" / "latest.pt")["env_steps"] > 0  # it has finished its rollout

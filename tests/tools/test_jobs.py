"""Several trainings at a time: what runs when, what a signal does, what a failure leaves alone, what is repeated."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import fake_train
import pytest
from toys import wait_for

from a2c.config.config import Config
from a2c.run.run_dir import RunLock
from a2c.tools.jobs import Jobs, describe, last_line
from a2c.tools.runs import Run

FAKE = [sys.executable, fake_train.__file__]
CONFIG = replace(Config.from_preset("cartpole"), threads=1)


def runs(*todo):
    """A run of each kind, with seeds 0, 1, ..."""
    return [Run("x", {}, replace(CONFIG, seed=seed), ("--do", what)) for seed, what in enumerate(todo)]


def times(out, seed):
    return [float(line) for line in (out / f"x/seed-{seed}" / "times.txt").read_text().split()]


def trained(out, *todo, jobs=2):
    work = Jobs(out, FAKE)
    work.train_all(runs(*todo), jobs)
    return work


def begun(out, count):
    return lambda: sum(1 for _ in out.glob("x/*/latest.pt")) >= count


@pytest.fixture
def after():
    """Call `act` in a thread once a condition holds."""
    threads = []

    def start(condition, act):
        def wait_and_act():
            wait_for(condition, 60)
            act()

        threads.append(threading.Thread(target=wait_and_act))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


@pytest.fixture
def hangups():
    """SIGHUP as it usually is, where the tests run under nohup, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("jobs", [1, 2])
def test_as_many_runs_are_trained_at_a_time_as_there_are_jobs(jobs, tmp_path):
    work = trained(tmp_path, *["meet" if jobs == 2 else "end"] * 3, jobs=jobs)
    spans = [times(tmp_path, seed) for seed in range(3)]
    assert max(sum(begin <= at < end for begin, end in spans) for at, _ in spans) == jobs
    assert work.codes == {f"x/seed-{seed}": 0 for seed in range(3)}


def test_what_a_run_prints_goes_to_its_log_and_one_line_tells_when_it_begins_and_ends(tmp_path, capfd):
    trained(tmp_path, "end", "fail", jobs=1)
    out, err = capfd.readouterr()
    assert err == "" and out.splitlines() == [
        "begin  x seed 0",
        "end    x seed 0: 1,200 decisions in 0:01:00, 475 at 1,000, best mean 500.0",
        "begin  x seed 1",
        "failed x seed 1 with exit status 1: error: it is broken",
    ]
    log = (tmp_path / "x/seed-1.log").read_text()
    assert log == f"--- a2c train --do fail --run-dir {tmp_path}/x/seed-1\nerror: it is broken\n"


def test_the_log_of_a_run_holds_plain_lines_where_colours_are_forced(tmp_path, monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    code = "from rich.console import Console; print(Console().is_terminal)"
    Jobs(tmp_path, [sys.executable, "-c", code]).train_all(runs("end"), 1)
    assert "False" in (tmp_path / "x/seed-0.log").read_text().splitlines()


def test_a_run_that_fails_leaves_the_others_alone_and_is_tried_again_by_the_next_comparison(tmp_path):
    first = trained(tmp_path, "fail once", "end", "end")
    assert first.codes == {"x/seed-0": 1, "x/seed-1": 0, "x/seed-2": 0}
    again = trained(tmp_path, "fail once", "end", "end")
    assert set(again.codes.values()) == {0}
    assert [len(times(tmp_path, seed)) for seed in range(3)] == [3, 2, 2]  # the failed attempt wrote one line


def test_a_run_that_ends_well_but_has_no_rows_is_a_failure_and_leaves_the_others_alone(tmp_path, capfd):
    work = trained(tmp_path, "no rows", "end", "end", jobs=1)
    assert work.codes == {"x/seed-0": 1, "x/seed-1": 0, "x/seed-2": 0} and not work.is_finished(*runs("no rows"))
    assert "failed x seed 0 with exit status 1: " in (out := capfd.readouterr().out) and "metrics.csv must have" in out
    assert "metrics.csv must have" in last_line(tmp_path / "x/seed-0.log")


def test_a_run_that_is_killed_has_failed(tmp_path, capfd):
    assert trained(tmp_path, "killed", "end").codes == {"x/seed-0": 128 + signal.SIGKILL, "x/seed-1": 0}
    assert "failed x seed 0 with exit status 137" in capfd.readouterr().out


def test_a_process_that_cannot_be_started_is_a_failure(tmp_path, capfd):
    work = Jobs(tmp_path, [str(tmp_path / "no such program")])
    work.train_all(runs("end", "end"), 1)
    assert set(work.codes.values()) == {1}
    assert capfd.readouterr().out.count("No such file or directory") == 2


def test_a_finished_run_is_trained_on_to_a_later_stop(tmp_path):
    def run_to(stop_after):
        return [replace(run, config=replace(run.config, stop_after=stop_after)) for run in runs("end")]

    Jobs(tmp_path, FAKE).train_all(run_to(4000), 1)
    finished = {stop: Jobs(tmp_path, FAKE).is_finished(*run_to(stop)) for stop in (3000, 4000, 5000, 0)}
    assert finished == {3000: True, 4000: True, 5000: False, 0: False}
    Jobs(tmp_path, FAKE).train_all(run_to(5000), 1)
    log = (tmp_path / "x/seed-0.log").read_text()
    assert f"--resume {tmp_path}/x/seed-0 --stop-after 5000 --log-every 5.0 --progress --no-wandb\n" in log


def test_a_run_whose_directory_was_removed_is_not_finished(tmp_path):
    trained(tmp_path, "end")
    (tmp_path / "x/seed-0/latest.pt").unlink()
    assert not Jobs(tmp_path, FAKE).is_finished(*runs("end"))


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_runs_begins_no_other_and_the_next_comparison_continues(
    sign, tmp_path, after, capfd, hangups
):
    after(begun(tmp_path, 2), lambda: os.kill(os.getpid(), sign))
    work = trained(tmp_path, "wait", "wait", "end")
    assert work.request.number == sign and work.codes == {}
    assert [len(times(tmp_path, seed)) for seed in (0, 1)] == [1, 1] and not (tmp_path / "x/seed-2").exists()
    assert capfd.readouterr().out.count("stop ") == 2  # the third never began
    again = trained(tmp_path, "wait", "wait", "end")
    assert again.codes == {f"x/seed-{seed}": 0 for seed in range(3)}
    assert "--resume" in (tmp_path / "x/seed-0.log").read_text()
    assert "--resume" not in (tmp_path / "x/seed-2.log").read_text()


def test_a_run_that_another_process_still_saves_is_waited_for(tmp_path, after, monkeypatch):
    (tmp_path / "x/seed-0").mkdir(parents=True)
    lock, released = RunLock(tmp_path / "x/seed-0"), []
    lock.take()
    after(begun(tmp_path, 1), lambda: released.append(time.monotonic()) or lock.release())
    assert trained(tmp_path, "end", "end").codes == {"x/seed-0": 0, "x/seed-1": 0}
    assert times(tmp_path, 1)[0] < released[0] < times(tmp_path, 0)[0]
    lock.take()
    monkeypatch.setattr("a2c.tools.jobs.ENDING", 0.3)
    (tmp_path / "status.json").unlink()
    assert trained(tmp_path, "end").codes == {"x/seed-0": 0}  # the fake run takes no lock, so the start does not fail
    assert len(times(tmp_path, 0)) == 4
    lock.release()


def test_a_run_that_had_finished_before_the_signal_is_not_repeated(tmp_path, after):
    both_begun, status = begun(tmp_path, 2), tmp_path / "status.json"

    def one_has_ended():
        return both_begun() and status.exists() and "x/seed-0" in status.read_text()

    after(one_has_ended, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert trained(tmp_path, "end", "wait").codes == {"x/seed-0": 0}
    assert json.loads((tmp_path / "status.json").read_text()) == {"x/seed-0": {"exit_status": 0, "stop_after": 0}}


@pytest.mark.parametrize("keep_policy_every", [0, 100])
def test_a_run_that_ends_well_after_the_signal_is_finished_unless_it_has_policies_to_evaluate(
    keep_policy_every, tmp_path, after, monkeypatch
):
    monkeypatch.setattr("a2c.tools.jobs.command", lambda *_: pytest.fail("nothing begins after a signal"))
    (run,) = runs("finish")
    work = Jobs(tmp_path, FAKE)
    after(begun(tmp_path, 1), lambda: os.kill(os.getpid(), signal.SIGTERM))
    work.train_all([replace(run, config=replace(run.config, keep_policy_every=keep_policy_every))], 1)
    assert work.codes == ({} if keep_policy_every else {run.name: 0})


def test_an_unexpected_error_stops_all_runs(tmp_path, monkeypatch):
    def broken(out, run):
        wait_for(begun(tmp_path, 2), 60)
        raise RuntimeError("broken")

    monkeypatch.setattr("a2c.tools.jobs.describe", broken)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="broken"):
        trained(tmp_path, "end", "wait")
    assert time.monotonic() - began < 30  # it would have slept for a minute


def test_a_second_interrupt_ends_all_runs_at_once(tmp_path, after):
    work = Jobs(tmp_path, FAKE)
    after(begun(tmp_path, 2), lambda: os.kill(os.getpid(), signal.SIGINT))
    after(lambda: bool(work.request), lambda: time.sleep(1) or os.kill(os.getpid(), signal.SIGINT))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work.train_all(runs("stubborn", "stubborn", "end"), 2)
    assert time.monotonic() - began < 30 and not work.running  # they would have slept for a minute
    assert not (tmp_path / "x/seed-2").exists()


def test_kept_policies_are_evaluated_after_the_training_in_another_process_that_may_fail(tmp_path, monkeypatch):
    seen = []

    def fails_at_first(run_dir, target, threads):
        seen.append((run_dir.name, target, threads))
        return [sys.executable, "-c", f"import sys; print('played'); sys.exit({len(seen) == 1})"]

    monkeypatch.setattr("a2c.tools.jobs.command", fails_at_first)
    keeping = [replace(run, config=replace(run.config, keep_policy_every=100)) for run in runs("end", "end")]
    work = Jobs(tmp_path, FAKE)
    work.train_all(keeping, 1)
    assert seen == [("seed-0", 475.0, 1), ("seed-1", 475.0, 1)]
    assert work.codes == {"x/seed-0": 1, "x/seed-1": 0}
    Jobs(tmp_path, FAKE).train_all(keeping, 1)
    assert [name for name, _, _ in seen] == ["seed-0", "seed-1", "seed-0"]
    assert (tmp_path / "x/seed-0.log").read_text().count("played") == 2


def test_policies_of_a_run_without_target_or_of_a_failed_one_are_not_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr("a2c.tools.jobs.command", lambda *_: pytest.fail("no evaluation"))
    first, second = runs("end", "fail")
    endless = replace(first.config, keep_policy_every=100, target_score=None)
    failing = replace(second.config, keep_policy_every=100)
    work = Jobs(tmp_path, FAKE)
    work.train_all([replace(first, config=endless), replace(second, config=failing)], 1)
    assert work.codes == {"x/seed-0": 0, "x/seed-1": 1}


def test_a_deadline_stops_all_runs_and_begins_no_other(tmp_path, capfd):
    work = Jobs(tmp_path, FAKE, deadline=time.monotonic() + 2)
    work.train_all(runs("wait", "end"), 1)
    assert work.out_of_time and work.codes == {} and not (tmp_path / "x/seed-1").exists()
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == ["begin", "stop"]


@pytest.mark.parametrize("status", [None, 3, [], {}, {"exit_status": 0}, {"exit_status": 0, "stop_after": "x"}])
def test_a_run_with_a_strange_status_is_not_finished(status, tmp_path):
    trained(tmp_path, "end")
    (tmp_path / "status.json").write_text(json.dumps({"x/seed-0": status}))
    assert not Jobs(tmp_path, FAKE).is_finished(*runs("end"))


@pytest.mark.parametrize("text", ["", "[1]", "3", "[" * 100_000])
def test_a_damaged_status_file_is_refused(text, tmp_path):
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(ValueError, match=r"status\.json must be a JSON object"):
        Jobs(tmp_path, FAKE)


def test_describe_tells_whether_target_and_frozen_policy_were_reached(tmp_path):
    run = replace(runs("end")[0], config=replace(CONFIG, keep_policy_every=100))
    run_dir = tmp_path / run.name
    run_dir.mkdir(parents=True)
    fake_train.write(run_dir, 100)
    assert describe(tmp_path, run) == "1,200 decisions in 0:01:00, 475 missed, frozen missed, best mean 100.0"
    (run_dir / "evaluations.csv").write_text("env_steps,mean\n100,20\n200,480\n300,490\n")
    assert "475 missed, frozen at 200" in describe(tmp_path, run)


def test_last_line_of_a_log_is_its_last_one_with_text(tmp_path):
    (tmp_path / "log").write_text("x" * 10_000 + "\nerror: this\n\n")
    assert last_line(tmp_path / "log") == "error: this"
    assert last_line(tmp_path / "no log") == last_line(Path(os.devnull)) == ""

"""The outputs of a run while the disk is full, read-only or gone, and the lock of its directory."""

import csv
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
from disks import FULL, Disk
from runs import TINY, TRAIN_PY, after_rollout, disturbed, rows, tiny
from toys import wait_for

from a2c.algorithms.base import TrainingStats
from a2c.cli import commands as cli
from a2c.config.config import Config
from a2c.envs.single import probe_spaces
from a2c.envs.vector_env import Episode
from a2c.metrics.meters import ScoreWindow, StageTimer
from a2c.processes.signals import StopRequest
from a2c.run import outputs, state
from a2c.run.checkpoint import load_checkpoint
from a2c.run.outputs import RunOutputs
from a2c.run.run_dir import RunLock
from a2c.run.trainer import Trainer


@pytest.fixture
def disk(tmp_path, monkeypatch):
    disk = Disk(tmp_path)
    monkeypatch.setattr("builtins.open", disk.open)
    return disk


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(outputs, "DISK_RETRY", 0.0)


def test_run_outputs_lose_no_row_on_a_full_disk_and_say_so_once(tmp_path, capsys, disk):
    run_dir = tmp_path / "run"
    run = Trainer(tiny(run_dir, log_every=1e-6, checkpoint_every=80, total_env_steps=800))

    def fill(rollouts):
        disk.full = 2 <= rollouts < 5

    after_rollout(run, fill)
    assert run.run().exit_code == 0
    assert capsys.readouterr().out.count("cannot write to") == 1
    written = [int(row["env_steps"]) for row in rows(run_dir / "metrics.csv")]
    assert written == list(range(80, 801, 80))
    assert len(rows(run_dir / "episodes.csv")) == run.scores.episodes
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] == 800


def test_run_outputs_lose_no_row_while_the_lock_cannot_be_seen(tmp_path, capsys, monkeypatch):
    run_dir = tmp_path / "run"
    run = Trainer(tiny(run_dir, log_every=1e-6, checkpoint_every=80, total_env_steps=800))
    keep, gone = run.lock.keep, []

    def refuse():
        if gone:
            raise OSError(errno.ESTALE, "Stale file handle")
        keep()

    monkeypatch.setattr(run.lock, "keep", refuse)
    after_rollout(run, lambda rollouts: gone.__setitem__(slice(None), [True] * (2 <= rollouts < 5)))
    assert run.run().exit_code == 0
    assert capsys.readouterr().out.count(f"cannot write to {run_dir}: Stale file handle") == 1
    assert [int(row["env_steps"]) for row in rows(run_dir / "metrics.csv")] == list(range(80, 801, 80))
    assert len(rows(run_dir / "episodes.csv")) == run.scores.episodes


def test_run_outputs_write_rows_that_wait_before_a_checkpoint(tmp_path, disk):
    run_dir, seen = tmp_path / "run", []
    run = Trainer(tiny(run_dir, checkpoint_every=80, total_env_steps=800))
    save = run.outputs.save

    def refuse(name, state):
        disk.full = False
        saved = save(name, state)
        seen.append((len(rows(run_dir / "episodes.csv")), run.scores.episodes))
        disk.full = True  # until the next checkpoint
        return saved

    run.outputs.save = refuse
    after_rollout(run, lambda _: None)
    assert run.run().exit_code == 0
    assert seen[-1][0] > 0 and all(written == counted for written, counted in seen)


def test_run_outputs_sync_all_rows_before_the_checkpoint_that_counts_them(tmp_path, monkeypatch):
    run_dir, synced, seen = tmp_path / "run", {}, []
    fsync, save = os.fsync, outputs.save_checkpoint

    def note(descriptor):
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    def check(path, state, **kwargs):
        tables = [(run_dir / name).stat() for name in ("metrics.csv", "episodes.csv")]
        seen.append([synced.get(table.st_ino) == table.st_size for table in tables])
        save(path, state, **kwargs)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(outputs, "save_checkpoint", check)
    assert Trainer(tiny(run_dir, checkpoint_every=80, total_env_steps=800, log_every=1e-6)).run().exit_code == 0
    assert len(seen) > 5 and all(table for tables in seen for table in tables)


def test_run_outputs_save_checkpoints_while_a_table_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "DISK_RETRY", 600.0)
    run_dir, saved = tmp_path / "run", []
    save = outputs.save_checkpoint

    def note(path, state, **kwargs):
        saved.append(state["env_steps"])
        save(path, state, **kwargs)

    def block():
        (run_dir / "episodes.csv").unlink()
        (run_dir / "episodes.csv").mkdir()

    monkeypatch.setattr(outputs, "save_checkpoint", note)
    _, code = disturbed(run_dir, block)
    assert code == 0 and saved == [0, 80, 160, 240, 320, 400, 480]


def test_run_outputs_say_that_the_last_rows_are_lost(tmp_path, capsys):
    run_dir = tmp_path / "run"

    def block():
        (run_dir / "episodes.csv").unlink()
        (run_dir / "episodes.csv").mkdir()

    _, code = disturbed(run_dir, block)
    out = capsys.readouterr().out
    assert code == 0 and out.count(f"the last rows are lost: they could not be written to {run_dir}") == 1


def test_run_dir_that_is_removed_is_made_again_with_the_last_checkpoint(tmp_path, capsys):
    run_dir = tmp_path / "run"
    _, code = disturbed(run_dir, lambda: shutil.rmtree(run_dir))
    assert code == 0
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] == 480
    assert cli.train(["--resume", str(run_dir), "--total-env-steps", "560"]) == 0
    assert "resumed at 480" in capsys.readouterr().out


def test_run_state_gives_up_after_a_while_where_the_last_checkpoint_cannot_be_saved(tmp_path, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(outputs, "save_checkpoint", refuse)
    monkeypatch.setattr(state, "DISK_PATIENCE", 0.2)
    assert cli.train([*TINY, "--total-env-steps", "160", "--run-dir", str(tmp_path / "run")]) == 1
    out, err = capsys.readouterr()
    assert out.count(f"cannot write to {tmp_path / 'run'}: Read-only file system") == 1
    assert err == f"error: the last checkpoint could not be written to {tmp_path / 'run'}\n"


def test_run_state_does_not_try_a_policy_file_again_at_once_where_the_disk_refuses(tmp_path, monkeypatch):
    tried = []

    def refuse(*args):
        tried.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "keep_policy", refuse)
    monkeypatch.setattr(outputs, "DISK_RETRY", 3600.0)
    monkeypatch.setattr(state, "DISK_PATIENCE", 0.2)
    config = tiny(tmp_path / "run", keep_policy_every=80, checkpoint_every=10**6)
    with pytest.raises(OSError, match="the last policy file could not be written"):
        Trainer(config).run()
    assert len(tried) == 1 and load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] == 480


def test_run_state_does_not_try_a_checkpoint_again_at_once_where_the_disk_refuses(tmp_path, monkeypatch):
    tried = []

    def refuse(*args, **kwargs):
        tried.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "save_checkpoint", refuse)
    monkeypatch.setattr(outputs, "DISK_RETRY", 3600.0)
    monkeypatch.setattr(state, "DISK_PATIENCE", 0.2)
    with pytest.raises(OSError, match="the last checkpoint could not be written"):
        Trainer(tiny(tmp_path / "run", checkpoint_every=80)).run()
    assert len(tried) == 1


def test_run_state_waits_for_the_disk_at_the_end(tmp_path, monkeypatch):
    save, refusals = outputs.save_checkpoint, []

    def refuse_twice(*args, **kwargs):
        refusals.append(1)
        if len(refusals) < 3:
            raise OSError(28, "No space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(outputs, "save_checkpoint", refuse_twice)
    assert Trainer(tiny(tmp_path / "run", total_env_steps=80)).run().exit_code == 0
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] == 80 and len(refusals) == 3


def test_run_lock_refuses_a_second_process_and_ends_with_its_process(tmp_path, capsys):
    assert cli.train([*TINY, "--total-env-steps", "80", "--run-dir", str(tmp_path / "run")]) == 0
    before = (tmp_path / "run" / "latest.pt").read_bytes()
    hold = (
        "import sys, time; from pathlib import Path; from a2c.run.run_dir import *; lock = RunLock(Path(sys.argv[1]))\n"
    )
    hold += "lock.take(); print('held', flush=True); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    capsys.readouterr()
    resume = ["--resume", str(tmp_path / "run"), "--total-env-steps", "160"]
    assert cli.train(resume) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: run_dir must not be in use by another process, got ") and err.count("\n") == 1
    assert (tmp_path / "run" / "latest.pt").read_bytes() == before
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert cli.train(resume) == 0
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] == 160


def test_run_lock_is_held_during_a_run_and_free_after_it(tmp_path):
    run_dir, refused = tmp_path / "run", []

    def knock():
        done = threading.Event()

        def other():
            try:
                RunLock(run_dir).take()
            except ValueError as error:
                refused.append(str(error))
            done.set()

        threading.Thread(target=other).start()
        assert done.wait(10)

    _, code = disturbed(run_dir, knock)
    assert code == 0 and len(refused) == 1 and "in use by another process" in refused[0]
    lock = RunLock(run_dir)
    lock.take()
    lock.release()


def test_run_dir_is_locked_until_the_curve_is_drawn(tmp_path, monkeypatch):
    lock, refused = RunLock(tmp_path / "run"), []

    def draw(*args):
        with pytest.raises(ValueError, match="in use by another process"):
            lock.take()
        refused.append(1)

    monkeypatch.setattr(outputs, "draw_curve", draw)
    assert Trainer(tiny(tmp_path / "run", total_env_steps=80)).run().exit_code == 0 and refused
    lock.take()
    lock.release()


def some_outputs(config):
    lock = RunLock(config.run_dir)
    lock.take()
    found = RunOutputs(lock, config, probe_spaces(config), ScoreWindow(), StageTimer(), StopRequest())
    found.open()
    return found


def test_run_outputs_log_counts_episodes_and_writes_rows_when_due(tmp_path):
    made = some_outputs(tiny(tmp_path, log_every=600.0))
    assert made.display.panel.frames_per_step == 1 and probe_spaces(Config()).frames_per_step == 4
    asked = []

    def learner_metrics():
        asked.append(1)
        return {"env_steps": 120, "updates": 3, "entropy": 0.5}

    made.log(TrainingStats(80, [Episode(0, 9.0, 9), Episode(1, 5.0, 5)], {"env": 0.5}), learner_metrics)
    assert not asked and not rows(tmp_path / "metrics.csv")  # no row is due, so no metric is computed
    made.log(TrainingStats(40, [Episode(2, 7.0, 7)], {}), learner_metrics, last=True)
    made.log(TrainingStats(0, [], {}), learner_metrics, last=True)  # nothing new
    assert [row["env_steps"] for row in rows(tmp_path / "episodes.csv")] == ["80", "80", "120"]
    (row,) = rows(tmp_path / "metrics.csv")
    assert (row["env_steps"], row["updates"], row["episodes"], float(row["reward_100"])) == ("120", "3", "3", 7.0)
    made.rewind(80)
    made.close()
    assert made.env_steps == 80 and made.row == {}
    made.lock.release()


@pytest.mark.parametrize("bad", ["a\0b", "x" * 5000, "/proc/nowhere/run", "/dev/null/run"])
def test_run_dir_that_is_impossible_is_refused_in_one_line(bad, capsys):
    assert cli.train([*TINY, "--total-env-steps", "80", "--run-dir", bad]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: run_dir must be a directory") and err.count("\n") == 1


def test_run_dir_with_only_a_lock_counts_as_empty(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").touch()
    assert Trainer(tiny(tmp_path / "run", total_env_steps=80)).run().exit_code == 0
    with open(tmp_path / "run" / "metrics.csv", newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 1


def test_train_command_saves_a_run_whose_output_cannot_be_written(tmp_path):
    runs = []
    for i, target in enumerate(("full", "closed")):
        args = [sys.executable, str(TRAIN_PY), *TINY, "--total-env-steps", "800", "--log-every", "0.001"]
        stdout = os.open(FULL, os.O_WRONLY) if target == "full" else subprocess.PIPE
        run = subprocess.Popen([*args, "--run-dir", str(tmp_path / str(i))], stdout=stdout, stderr=subprocess.PIPE)
        if target == "closed":
            run.stdout.close()
        runs.append(run)
    for i, run in enumerate(runs):
        err, code = run.stderr.read().decode(), run.wait(60)
        assert load_checkpoint(tmp_path / str(i) / "latest.pt")["env_steps"] == 800, err
        assert (code, err) == (0, "")


@pytest.mark.parametrize("ignored", [False, True])
def test_train_command_saves_when_its_terminal_is_closed_and_goes_on_under_nohup(ignored, tmp_path):
    mine, its = os.openpty()
    os.set_blocking(mine, False)
    args = [*TINY, "--total-env-steps", "16000" if ignored else "100000000", "--run-dir", str(tmp_path / "run")]

    def has_rows():
        with suppress(OSError):  # nothing to read now, or any more
            while os.read(mine, 4096):  # so that it never has to wait for a reader
                pass
        return (tmp_path / "run/episodes.csv").exists() and len(rows(tmp_path / "run/episodes.csv")) > 0

    def begin():
        os.login_tty(its)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    run = subprocess.Popen([sys.executable, str(TRAIN_PY), *args], preexec_fn=begin)
    os.close(its)
    wait_for(has_rows, 60)
    os.close(mine)  # from now on its output fails, too
    assert run.wait(60) == (0 if ignored else 128 + signal.SIGHUP)
    counted = load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"]
    assert counted == 16000 if ignored else counted > 0


def test_curve_is_drawn_at_checkpoints_but_not_at_every_one(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(outputs, "draw_curve", lambda run_dir, title, target: drawn.append(title))
    # A clock that stands still: a slow moment of the machine would count as drawing, and put off the next one.
    monkeypatch.setattr(outputs, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    for every, times in ((3600.0, 1), (0.0, 7)):  # the run begins with a checkpoint, five are within it
        drawn.clear()
        monkeypatch.setattr(outputs, "CURVE_EVERY", every)
        assert Trainer(tiny(tmp_path / str(every), checkpoint_every=80)).run().exit_code == 0
        assert drawn == ["CartPole-v1, seed 0"] * times


def test_curve_that_is_slow_to_draw_takes_a_hundredth_of_the_time(tmp_path, monkeypatch):
    clock, drawn_at = [0.0], []

    def draw(*args):
        drawn_at.append(clock[0])
        clock[0] += 2.0

    monkeypatch.setattr(outputs, "draw_curve", draw)
    monkeypatch.setattr(outputs, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    made = some_outputs(tiny(tmp_path))
    for seconds in (59.0, 60.0, 261.0, 262.0, 463.0, 464.0):
        clock[0] = seconds
        made.draw_curve_when_due()
    made.close()
    made.lock.release()
    assert drawn_at == [60.0, 262.0, 464.0]

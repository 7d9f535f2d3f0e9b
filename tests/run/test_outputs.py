"""A disk that is full, read-only or gone, and a run directory that two processes want."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from runs import TINY, TRAIN_PY, disturbed, rows, tiny

from a2c.cli import commands as cli
from a2c.metrics.files import CsvTable
from a2c.metrics.logger import EventFile, RunLogger
from a2c.run import outputs as record
from a2c.run import trainer
from a2c.run.checkpoint import load_checkpoint
from a2c.run.run_dir import RunLock
from a2c.run.trainer import Trainer

FULL = "/dev/full"  # every write to it fails with ENOSPC


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(record, "DISK_RETRY", 0.0)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A disk that takes nothing more while `disk.full` is true (but a file may be cut)."""
    real = open

    class Disk:
        full = False

        def open(self, file, mode="r", *args, **kwargs):
            full = self.full and str(file).startswith(str(tmp_path)) and set(mode) & set("wax")
            return real(FULL, "wb", buffering=0) if full else real(file, mode, *args, **kwargs)

    disk = Disk()
    monkeypatch.setattr("builtins.open", disk.open)
    return disk


def test_rows_wait_while_the_disk_is_full(tmp_path, disk):
    table = CsvTable(tmp_path / "table.csv", ("env_steps", "score"))
    table.add([(1, 2.0)])
    disk.full = True
    for env_steps in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            table.add([(env_steps, 4.0)])
    disk.full = False
    table.add([(4, 5.0)])
    assert [row["env_steps"] for row in rows(tmp_path / "table.csv")] == ["1", "2", "3", "4"]


def test_a_nearly_full_disk_leaves_no_half_row(tmp_path, monkeypatch):
    table = CsvTable(tmp_path / "table.csv", ("env_steps", "score"))
    table.add([(1, 2.0)])
    real = open

    class Nearly:
        """A file that takes three bytes and then no more."""

        def __init__(self, *args, **kwargs):
            self.file, self.room = real(*args, **kwargs), 3

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, content):
            if not self.room:
                raise OSError(28, "No space left on device")
            self.room = 0
            return self.file.write(content[:3])

    monkeypatch.setattr("builtins.open", Nearly)
    with pytest.raises(OSError, match="No space left"):
        table.add([(222, 3.0)])
    monkeypatch.undo()
    assert (tmp_path / "table.csv").read_text().split() == ["env_steps,score", "1,2.0"]
    table.add([])
    assert (tmp_path / "table.csv").read_text().split() == ["env_steps,score", "1,2.0", "222,3.0"]


def test_a_full_disk_costs_one_message_and_no_row(tmp_path, capsys, disk):
    run_dir = tmp_path / "run"

    def fill():
        disk.full = True
        threading.Timer(0.05, empty).start()

    def empty():
        disk.full = False

    run, code = disturbed(run_dir, fill, total_env_steps=4000)
    assert code == 0
    assert capsys.readouterr().out.count("cannot write to") == 1
    written = [int(row["env_steps"]) for row in rows(run_dir / "metrics.csv")]
    assert written == list(range(80, 4001, 80))
    assert len(rows(run_dir / "episodes.csv")) == run.scores.games
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] == 4000


def test_a_refused_row_does_not_keep_the_checkpoint_from_being_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "DISK_RETRY", 600.0)
    run_dir, saved = tmp_path / "run", []
    save = record.save_checkpoint

    def note(path, state, **kwargs):
        saved.append(state["env_steps"])
        save(path, state, **kwargs)

    def block():
        (run_dir / "episodes.csv").unlink()
        (run_dir / "episodes.csv").mkdir()

    monkeypatch.setattr(record, "save_checkpoint", note)
    _, code = disturbed(run_dir, block)
    assert code == 0 and saved == [0, 80, 160, 240, 320, 400, 480]


def test_a_directory_that_vanishes_is_made_again_with_the_last_checkpoint(tmp_path, capsys):
    run_dir = tmp_path / "run"
    _, code = disturbed(run_dir, lambda: shutil.rmtree(run_dir))
    assert code == 0
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] == 480
    assert cli.train(["--resume", str(run_dir), "--total-env-steps", "560"]) == 0
    assert "resumed at 480" in capsys.readouterr().out


def test_a_disk_that_never_takes_the_last_checkpoint_ends_the_run_with_one_line(tmp_path, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(record, "save_checkpoint", refuse)
    monkeypatch.setattr(trainer, "DISK_PATIENCE", 0.2)
    assert cli.train([*TINY, "--total-env-steps", "160", "--run-dir", str(tmp_path / "run")]) == 1
    out, err = capsys.readouterr()
    assert out.count(f"cannot write to {tmp_path / 'run'}: Read-only file system") == 1
    assert err == f"error: the last checkpoint could not be written to {tmp_path / 'run'}\n"


def test_a_run_waits_for_the_disk_at_its_end(tmp_path, monkeypatch):
    save, refusals = record.save_checkpoint, []

    def refuse_twice(*args, **kwargs):
        refusals.append(1)
        if len(refusals) < 3:
            raise OSError(28, "No space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(record, "save_checkpoint", refuse_twice)
    assert Trainer(tiny(tmp_path / "run", total_env_steps=80)).run() == 0
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] == 80 and len(refusals) == 3


def test_tensorboard_reads_what_the_event_file_holds(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    file = EventFile(tmp_path / "board", first_step=40)
    file.add(50, 1.0, {"reward": 2.5, "nothing": float("nan")})
    file.close()
    content = next((tmp_path / "board").iterdir()).read_bytes()
    events, at = [], 0
    while at < len(content):  # length, checksum, event, checksum
        length = int.from_bytes(content[at : at + 8], "little")
        events.append(Event.FromString(content[at + 12 : at + 12 + length]))
        at += 16 + length
    assert events[0].file_version == "brain.Event:2"
    assert events[1].step == 40 and events[1].session_log.status == 1
    (value,) = events[2].summary.value
    assert (events[2].step, value.tag, value.simple_value) == (50, "reward", 2.5)
    assert len(events) == 3


def test_a_second_process_is_refused_and_a_dead_one_s_lock_is_taken_over(tmp_path, capsys):
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


def test_a_lock_is_held_during_a_run_and_free_behind_it(tmp_path):
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


@pytest.mark.parametrize("bad", ["a\0b", "x" * 5000, "/proc/nowhere/run", "/dev/null/run"])
def test_a_directory_that_cannot_be_is_refused_in_one_line(bad, capsys):
    assert cli.train([*TINY, "--total-env-steps", "80", "--run-dir", bad]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: run_dir must be a directory") and err.count("\n") == 1


def test_only_a_lock_of_a_refused_start_does_not_make_a_directory_taken(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").touch()
    assert Trainer(tiny(tmp_path / "run", total_env_steps=80)).run() == 0
    with open(tmp_path / "run" / "metrics.csv", newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 1


def test_a_heal_on_a_full_disk_doubles_no_row(tmp_path, disk):
    table = CsvTable(tmp_path / "table.csv", ("env_steps", "score"))
    table.add([(1, 1.0), (2, 1.0), (3, 1.0)])
    disk.full = True
    table.rewind(1)
    with pytest.raises(OSError, match="No space left"):
        table.add([(2, 2.0)])
    table.rewind(1)  # and once more before the disk has room
    disk.full = False
    table.add([(2, 3.0)])
    assert (tmp_path / "table.csv").read_text().split() == ["env_steps,score", "1,1.0", "2,3.0"]


def test_points_for_tensorboard_may_be_lost_and_rows_not(tmp_path):
    logger = RunLogger(tmp_path, tiny(tmp_path / "run"))
    (tmp_path / "tensorboard").write_text("in the way")
    for _ in range(2):
        with pytest.raises(OSError, match="exists"):
            logger.metrics({"env_steps": 80})
    (tmp_path / "tensorboard").unlink()
    logger.rewind(40)
    logger.metrics({"env_steps": 80})
    logger.close()
    assert [row["env_steps"] for row in rows(tmp_path / "metrics.csv")] == ["80"]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_a_run_whose_output_goes_to_a_full_disk_or_a_closed_pipe_is_saved(tmp_path):
    runs = []
    for i, target in enumerate(("full", "closed")):
        args = [sys.executable, str(TRAIN_PY), *TINY, "--total-env-steps", "800", "--log-every", "0.001"]
        stdout = os.open(FULL, os.O_WRONLY) if target == "full" else subprocess.PIPE
        run = subprocess.Popen([*args, "--run-dir", str(tmp_path / str(i))], stdout=stdout, stderr=subprocess.PIPE)
        if target == "closed":
            run.stdout.close()
        runs.append(run)
    for i, run in enumerate(runs):
        err, _ = run.stderr.read(), run.wait(60)
        assert load_checkpoint(tmp_path / str(i) / "latest.pt")["env_steps"] == 800, err

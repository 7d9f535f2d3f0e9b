"""A run directory from somebody else, from a killed process, or removed meanwhile: nothing outside of it is touched."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc

import pytest
from runs import TINY, disturbed, rows, tiny

from a2c.cli import commands as cli
from a2c.cli.flags import parse_config
from a2c.metrics.files import SMALL, CsvTable, read_small, read_table, write_atomically
from a2c.metrics.logger import EventFile
from a2c.metrics.results import read_episodes
from a2c.run import run_dir as directory
from a2c.run.checkpoint import load_checkpoint, save_checkpoint
from a2c.run.run_dir import FILES, LEFTOVERS, RunLock
from a2c.run.trainer import Trainer
from a2c.tools.record_video import record

COLUMNS = ("env_steps", "seconds", "score", "length")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of 240 decisions."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    flags = [*TINY, "--log-every", "1e-6", "--checkpoint-every", "80", "--no-lr-decay", "--no-progress"]
    assert Trainer(parse_config([*flags, "--total-env-steps", "240", "--run-dir", str(run_dir)])).run() == 0
    return run_dir


@pytest.fixture
def prepared(finished, tmp_path):
    """A copy of it, to put traps into."""
    return shutil.copytree(finished, tmp_path / "run")


def resume(run_dir, *flags):
    return cli.train(["--resume", str(run_dir), "--total-env-steps", "400", *flags])


@pytest.mark.parametrize("where", ["file", "missing"])
def test_links_at_every_predictable_name_lead_nowhere(where, prepared, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    names = [name for name in FILES if name != "config.json"]
    traps = {name + ".tmp": outside / f"{name}.tmp" for name in FILES}
    traps |= {name: outside / name for name in names if name not in ("latest.pt", "metrics.csv", "episodes.csv")}
    for name, target in traps.items():
        (prepared / name).unlink(missing_ok=True)
        (prepared / name).symlink_to(target)
        if where == "file":
            target.write_text("precious")
    assert resume(prepared, "--target-score", "5", "--num-envs", "4") == 0
    assert load_checkpoint(prepared / "latest.pt")["env_steps"] == 400
    left = {path.name: path.read_text() for path in outside.iterdir()}
    assert left == ({target.name: "precious" for target in traps.values()} if where == "file" else {})
    assert not any(path.is_symlink() for path in prepared.iterdir() if path.name != "best.pt")


@pytest.mark.parametrize("name", ["metrics.csv", "episodes.csv", "tensorboard", "lock"])
def test_a_link_where_a_run_writes_in_place_is_refused_in_one_line(name, prepared, tmp_path, capsys):
    path, outside = prepared / name, tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    before = sorted(outside.iterdir()) if outside.is_dir() else outside.read_bytes()
    assert resume(prepared) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: run_dir must") and f"{name} must not be a link" in err and err.count("\n") == 1
    assert (sorted(outside.iterdir()) if outside.is_dir() else outside.read_bytes()) == before


def test_an_atomic_file_goes_through_no_link(tmp_path):
    (tmp_path / "precious").write_text("precious")
    for name in ("file", "file.tmp", "latest.pt", "latest.pt.tmp", "previous.pt", "previous.pt.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    write_atomically(tmp_path / "file", b"content")
    for _ in range(2):
        save_checkpoint(tmp_path / "latest.pt", {"env_steps": 1}, keep_previous=True)
    assert (tmp_path / "precious").read_text() == "precious" and (tmp_path / "file").read_bytes() == b"content"
    assert not any((tmp_path / name).is_symlink() for name in ("file", "latest.pt", "previous.pt"))


def test_a_link_that_comes_later_is_not_followed_either(tmp_path):
    table = CsvTable(tmp_path / "table.csv", COLUMNS)
    table.add([(1, 1.0, 1.0, 1)])
    (tmp_path / "table.csv").rename(tmp_path / "kept.csv")
    (tmp_path / "table.csv").symlink_to(tmp_path / "kept.csv")
    before = (tmp_path / "kept.csv").read_bytes()
    for rewind in (False, True):
        if rewind:
            table.rewind(0)
        with pytest.raises(OSError, match="symbolic"):
            table.add([(2, 1.0, 1.0, 1)])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tensorboard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="must not be a link"):
        EventFile(tmp_path / "tensorboard", None)
    assert (tmp_path / "kept.csv").read_bytes() == before and not list((tmp_path / "elsewhere").iterdir())


def test_a_table_with_two_names_grows_under_one_of_them(tmp_path):
    CsvTable(tmp_path / "table.csv", COLUMNS).add([(10, 1.0, 5, 6), (30, 1.0, 5, 6)])
    os.link(tmp_path / "table.csv", tmp_path / "other.csv")
    before = (tmp_path / "other.csv").read_bytes()
    table = CsvTable(tmp_path / "table.csv", COLUMNS, keep_until=20)
    table.add([(40, 1.0, 5, 6)])
    assert [row["env_steps"] for row in rows(tmp_path / "table.csv")] == ["10", "40"]
    assert (tmp_path / "other.csv").read_bytes() == before


def test_a_long_table_with_two_names_is_copied_in_blocks(tmp_path):
    end = big_table(tmp_path / "table.csv", 17)
    os.link(tmp_path / "table.csv", tmp_path / "other.csv")
    before = (tmp_path / "table.csv").read_bytes()
    tracemalloc.start()
    CsvTable(tmp_path / "table.csv", COLUMNS, keep_until=end)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6 and (tmp_path / "table.csv").read_bytes() == before
    assert not (tmp_path / "table.csv").samefile(tmp_path / "other.csv")


def test_a_pipe_in_place_of_a_file_is_refused_in_one_line(finished, tmp_path):
    names = ["config.json", "metrics.csv", "episodes.csv"]
    for name in names:
        copy = shutil.copytree(finished, tmp_path / name)
        (copy / name).unlink()
        os.mkfifo(copy / name)
    code = "import sys; from a2c.cli.commands import train\n"
    code += "for run in sys.argv[1:]: print(train(['--resume', run, '--total-env-steps', '400']), file=sys.stderr)"
    command = [sys.executable, "-c", code, *(str(tmp_path / name) for name in names)]  # which could wait for ever
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    refusals = done.stderr.splitlines()
    assert len(refusals) == 6 and refusals[1::2] == ["2", "2", "2"], done.stderr
    for name, refusal in zip(names, refusals[::2], strict=True):
        assert f"{name} must be a regular file" in refusal


def test_a_small_file_is_small_and_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("ä" * (SMALL // 2), encoding="utf-8")
    assert read_small(path) == "ä" * (SMALL // 2)
    path.write_bytes(b"a" * (SMALL + 1))
    with pytest.raises(ValueError, match=r"config\.json must have at most 1,048,576 bytes"):
        read_small(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"config\.json must be a regular file"):
        read_small(path)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "missing")


def test_a_table_reader_does_not_wait_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "episodes.csv")
    with pytest.raises(OSError, match="must be a regular file"):
        read_episodes(tmp_path)


def test_a_hole_in_a_table_takes_no_memory(tmp_path):
    path = tmp_path / "episodes.csv"
    CsvTable(path, COLUMNS).add([(10, 1.0, 5, 6)])
    os.truncate(path, 30_000_000)
    with open(path, "ab") as file:
        file.write(b"\n20,1.0,7,6\r\n")
    tracemalloc.start()
    episodes = read_episodes(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert episodes["score"].tolist() == [5, 7] and peak < 10e6


def test_a_film_goes_through_no_link(finished, tmp_path, monkeypatch):
    def write(path, pictures, fps):
        path.write_bytes(b"film")

    monkeypatch.setattr("a2c.tools.record_video._play", lambda *args: iter(()))
    monkeypatch.setitem(__import__("a2c.tools.record_video").recording.WRITERS, ".gif", write)
    (tmp_path / "precious").write_text("precious")
    for name in ("game.gif", "game.gif.tmp", ".game.gif.tmp.gif"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    record(finished, tmp_path / "game.gif")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "game.gif").read_bytes() == b"film" and not (tmp_path / "game.gif").is_symlink()


def test_files_have_the_usual_permissions(tmp_path):
    write_atomically(tmp_path / "file", b"content")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~umask


def states_of(run, directory, copies):
    """Copies of `directory` as a kill before each change of it during `run()` leaves it, half-written files too."""
    at_work, seen = [True], set()

    def look(event, args):
        changes = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.truncate")
        if not at_work or not at_work[0] or event not in changes:
            return
        if not any(str(directory) in str(arg) for arg in args if isinstance(arg, str | os.PathLike)):
            return
        at_work[0] = False
        shape = tuple(sorted((p.name, p.stat().st_size) for p in directory.iterdir())) if directory.exists() else None
        if shape is not None and shape not in seen:
            seen.add(shape)
            shutil.copytree(directory, copies / str(len(seen)))
        at_work[0] = True

    sys.addaudithook(look)
    try:
        run()
    finally:
        at_work[0] = False
    states = sorted(copies.iterdir(), key=lambda path: int(path.name))
    for state in list(states):
        half = [path for path in state.iterdir() if path.name.endswith(".tmp")]
        if half:
            torn = shutil.copytree(state, copies / f"{state.name}-torn")
            for path in half:
                os.truncate(torn / path.name, path.stat().st_size // 2)
            states.append(torn)
    return states


def test_a_start_that_is_killed_anywhere_can_be_started_again_or_resumed(tmp_path, capsys, monkeypatch):
    run_dir = tmp_path / "run"
    config = tiny(run_dir, total_env_steps=80, log_every=1e-6)
    (tmp_path / "states").mkdir()
    states = states_of(lambda: Trainer(config).run(), run_dir, tmp_path / "states")
    kinds = {name: [state for state in states if (state / name).exists()] for name in LEFTOVERS}
    assert len(states) >= 12 and all(kinds[name] for name in LEFTOVERS), kinds
    monkeypatch.setattr("a2c.run.outputs.draw_curve", lambda *args: None)  # takes most of the time
    resumed = 0
    for state in states:
        capsys.readouterr()
        begun = (state / "latest.pt").exists()
        resumed += begun
        where = ["--resume", str(state)] if begun else [*TINY, "--run-dir", str(state)]
        assert cli.train([*where, "--total-env-steps", "80"]) == 0, (state, capsys.readouterr().err)
        assert load_checkpoint(state / "latest.pt")["env_steps"] == 80
        assert [row["env_steps"] for row in rows(state / "metrics.csv")] in (["80"], [])
        assert not list(state.glob("*.tmp"))
    assert 0 < resumed < len(states)


def test_kept_results_are_no_remains_of_a_start(prepared, capsys):
    keep = {name: (prepared / name).read_bytes() for name in ("config.json", "metrics.csv", "episodes.csv")}
    shutil.rmtree(prepared)
    for names in (["metrics.csv"], ["episodes.csv"], list(keep)):
        prepared.mkdir()
        for name in names:
            (prepared / name).write_bytes(keep[name])
        assert cli.train([*TINY, "--run-dir", str(prepared), "--total-env-steps", "80"]) == 2
        err = capsys.readouterr().err
        assert "holds no checkpoint, so no run can go on there; remove it if its rows are not needed" in err
        assert "--resume" not in err and err.count("\n") == 1
        assert {path.name: path.read_bytes() for path in prepared.iterdir()} == {name: keep[name] for name in names}
        shutil.rmtree(prepared)


def test_a_directory_with_a_checkpoint_is_resumed_not_removed(prepared, capsys):
    (prepared / "latest.pt").unlink()  # the one before is there
    assert cli.train([*TINY, "--run-dir", str(prepared)]) == 2
    assert f"--resume {prepared} goes on with a run" in capsys.readouterr().err


def test_a_run_that_never_saved_is_said_to_hold_no_checkpoint(prepared, capsys):
    for path in [*prepared.glob("*.pt"), prepared / "metrics.csv", prepared / "episodes.csv"]:
        path.unlink()  # events alone
    assert cli.train([*TINY, "--run-dir", str(prepared)]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_a_resume_that_is_killed_anywhere_can_be_resumed(prepared, tmp_path):
    (tmp_path / "states").mkdir()
    states = states_of(lambda: resume(prepared, "--gamma", "0.5"), prepared, tmp_path / "states")
    assert len(states) >= 12
    for state in states[:: 1 + len(states) // 12]:
        assert resume(state) == 0
        steps = [int(row["env_steps"]) for row in rows(state / "metrics.csv")]
        assert steps == sorted(set(steps)) and load_checkpoint(state / "latest.pt")["env_steps"] == 400


def test_a_removed_directory_is_locked_again(tmp_path):
    run_dir, refused = tmp_path / "run", []
    run = Trainer(tiny(run_dir, log_every=1e-6, checkpoint_every=80))
    training_step, calls = run.training_step, []

    def advance_and_look():
        calls.append(1)
        if len(calls) == 2:
            shutil.rmtree(run_dir)
        if len(calls) == 4:
            with pytest.raises(ValueError, match="in use by another process") as refusal:
                RunLock(run_dir).take()
            refused.append(refusal)
        return training_step()

    run.training_step = advance_and_look
    assert run.run() == 0 and refused
    lock = RunLock(run_dir)
    lock.take()  # free behind the run, its last picture included
    lock.release()


def test_a_run_whose_directory_another_process_has_made_its_own_leaves_it_alone(tmp_path):
    run_dir, other = tmp_path / "run", RunLock(tmp_path / "run")

    def lose():
        shutil.rmtree(run_dir)
        other.take()

    with pytest.raises(ValueError, match="in use by another process"):
        disturbed(run_dir, lose)
    assert {path.name for path in run_dir.iterdir()} == {"lock"}
    other.release()


HOLD = """
import errno, fcntl, sys, time
from pathlib import Path
def flock(*args):
    raise OSError(errno.ENOSYS, "Function not implemented")
fcntl.flock = flock
from a2c.run.run_dir import RunLock
RunLock(Path(sys.argv[1])).take()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def no_flock(monkeypatch):
    """A network file system: no locks of the system, no two files that change names."""

    def flock(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("filelock._soft.exchange_names", lambda *args: False)


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_without_locks_of_the_system_a_dead_process_keeps_nobody_out(tmp_path, no_flock):
    other = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=r"in use by another process.* remove .*lock$"):
        RunLock(tmp_path / "run").take()
    other.send_signal(signal.SIGKILL)
    other.wait()
    lock = RunLock(tmp_path / "run")
    lock.take()
    with pytest.raises(ValueError, match="in use by another process"):
        RunLock(tmp_path / "run").take()
    lock.release()
    assert not (tmp_path / "run" / "lock").exists()


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_of_two_that_find_a_dead_owner_one_gets_the_lock(tmp_path, no_flock, monkeypatch):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / "lock").write_text(f"{dead.pid}\n{socket.gethostname()}\n")
    first, second, judge, calls = RunLock(tmp_path), RunLock(tmp_path), directory._of_a_dead_process, []

    def judge_slowly(path):
        judged = judge(path)
        calls.append(judged)
        if len(calls) == 1:
            second.take()
        return judged

    monkeypatch.setattr(directory, "_of_a_dead_process", judge_slowly)
    with pytest.raises(ValueError, match="in use by another process"):
        first.take()
    assert calls[0] and [path.name for path in tmp_path.iterdir()] == ["lock"]
    held = (tmp_path / "lock").stat()
    second.keep()  # still its own
    assert os.path.samestat(held, (tmp_path / "lock").stat())
    second.release()


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("content", ["", f"{os.getpid()}\n{socket.gethostname()}\n", "7\nanother-host\n"])
def test_a_lock_that_may_be_held_says_what_to_do(content, tmp_path, no_flock):
    (tmp_path / "lock").write_text(content)
    with pytest.raises(ValueError, match=f"if no process on any host uses it, remove {tmp_path / 'lock'}"):
        RunLock(tmp_path).take()
    (tmp_path / "lock").unlink()
    lock = RunLock(tmp_path)
    lock.take()
    lock.release()


def test_a_resume_says_what_it_changes_and_keeps_what_was(prepared, capsys):
    before = json.loads((prepared / "config.json").read_text())
    assert resume(prepared, "--gamma", "0.5", "--no-normalize-obs") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "gamma: 0.99 -> 0.5" in lines and "normalize_obs: True -> False" in lines
    assert "total_env_steps: 240 -> 400" in lines
    assert sum(" -> " in line for line in lines) == 3
    assert json.loads((prepared / "config-until-240.json").read_text()) == before
    assert json.loads((prepared / "config.json").read_text())["gamma"] == 0.5
    assert resume(prepared) == 0
    assert " -> " not in capsys.readouterr().out and len(list(prepared.glob("config-until-*"))) == 1


def big_table(path, megabytes=100):
    """A table of that size; its env_steps rise by 10 per row, in the last 500,000 rows at least."""
    first = 10_000_000_000  # all rows are equally long
    block = b"".join(b"%d,123456.78,-21,1234\r\n" % (first - 10_000_000 + 10 * i) for i in range(30_000))
    with open(path, "wb") as file:
        file.write(b"env_steps,seconds,score,length\r\n")
        file.write(block * max(1, megabytes - 16))
        file.write(b"".join(b"%d,123456.78,-21,1234\r\n" % (first + 10 * i) for i in range(500_000)))
    return first + 5_000_000


def test_a_resume_reads_only_the_end_of_a_long_table(tmp_path):
    end = big_table(tmp_path / "episodes.csv")
    size = (tmp_path / "episodes.csv").stat().st_size
    tracemalloc.start()
    began = time.perf_counter()
    table = CsvTable(tmp_path / "episodes.csv", COLUMNS, keep_until=end - 10 - 300_000)
    table.add([(end, "1.00", "5", 6)])
    seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6 and seconds < 5
    row = len(b"10000000000,123456.78,-21,1234\r\n")
    assert (tmp_path / "episodes.csv").stat().st_size == size - 30_000 * row + len(f"{end},1.00,5,6\r\n")
    with open(tmp_path / "episodes.csv", "rb") as file:
        file.seek(-3 * row, os.SEEK_END)
        last = file.read().split(b"\r\n")[-3:]
    assert last == [b"%d,123456.78,-21,1234" % (end - 300_010), b"%d,1.00,5,6" % end, b""]


def test_reading_a_long_table_takes_little_more_than_its_numbers(tmp_path):
    big_table(tmp_path / "episodes.csv", 10)
    tracemalloc.start()
    episodes = read_episodes(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    numbers = sum(column.nbytes for column in episodes.values())
    assert len(episodes["score"]) > 300_000 and peak < 2.5 * numbers + 8e6


@pytest.mark.parametrize(
    "ending", ["", "12,1.", "12,1.00,5", "12,1.00,5,6", "x,1,2,3\r\n", "12,a,2,3\r\n", "\0" * 300_000]
)
def test_what_is_no_row_at_the_end_of_a_table_is_cut_off(ending, tmp_path):
    path = tmp_path / "table.csv"
    kept = [(10 * i, "1.50", "nan", 5) for i in range(1, 5001)]  # longer than a block
    CsvTable(path, COLUMNS).add(kept)
    before = path.read_bytes()
    with open(path, "a", newline="", encoding="utf-8") as file:
        file.write(ending)
    CsvTable(path, COLUMNS, keep_until=10**9)
    assert path.read_bytes() == before
    for keep in (49_995, 30_000, 29_999, 10, 9):
        CsvTable(path, COLUMNS, keep_until=keep)
        assert [int(row["env_steps"]) for row in rows(path)] == [step for step, *_ in kept if step <= keep]


def test_a_table_whose_line_ends_were_changed_goes_on(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("env_steps,seconds,score,length\n10,1.0,5,6\n20,1.0,5,6\n")
    CsvTable(path, COLUMNS, keep_until=10).add([(30, 1.0, 5, 6)])
    assert [row["env_steps"] for row in rows(path)] == ["10", "30"]


def test_a_table_that_is_not_ours_begins_anew_and_readers_skip_what_is_no_number(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("#!/bin/sh\nrm -rf /\n")
    CsvTable(path, COLUMNS, keep_until=10)
    assert path.read_bytes() == b"env_steps,seconds,score,length\r\n"
    assert (tmp_path / "table.csv.old").read_text() == "#!/bin/sh\nrm -rf /\n"
    path.write_text("another\n")
    (tmp_path / "table.csv.old2").symlink_to("nowhere")
    CsvTable(path, COLUMNS, keep_until=10)
    assert (tmp_path / "table.csv.old").read_text() == "#!/bin/sh\nrm -rf /\n"
    assert (tmp_path / "table.csv.old3").read_text() == "another\n"
    with open(path, "a", newline="", encoding="utf-8") as file:
        file.write("1,1.0,5,6\r\n2,evil,5,6\r\n3,1.0,5\r\n\r\n4,,nan,6\r\n5,1.0,5,6,7\r\n6,1.0,-inf,9\r\n7,1.0,5,6")
    read = read_table(path, ("env_steps", "score"))
    assert read["env_steps"].tolist() == [1, 4, 6] and str(read["score"].tolist()) == "[5.0, nan, -inf]"
    with pytest.raises(ValueError, match="got none called lag"):
        read_table(path, ("env_steps", "policy_lag"))

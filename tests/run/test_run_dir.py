"""A run directory of somebody else, of a killed process, or removed during a run: nothing outside it is changed."""

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from runs import TINY, after_rollout, disturbed, rows, tiny

from a2c.cli import commands as cli
from a2c.cli.flags import parse_config
from a2c.config.config import Config
from a2c.run import run_dir as directory
from a2c.run.checkpoint import load_checkpoint
from a2c.run.run_dir import FILES, LEFTOVERS, RunLock
from a2c.run.trainer import Trainer
from a2c.tools.record_video import record_video
from a2c.tools.video_writers import WRITERS

COLUMNS = ("env_steps", "seconds", "score", "length")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of 240 decisions."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    flags = [*TINY, "--log-every", "1e-6", "--checkpoint-every", "80", "--lr-final", "1", "--no-progress"]
    flags += ["--keep-policy-every", "80"]
    assert Trainer(parse_config([*flags, "--total-env-steps", "240", "--run-dir", str(run_dir)])).run().exit_code == 0
    return run_dir


@pytest.fixture
def prepared(finished, tmp_path):
    """A copy of it that a test may change."""
    return shutil.copytree(finished, tmp_path / "run")


def resume(run_dir, *flags):
    return cli.train(["--resume", str(run_dir), "--total-env-steps", "400", *flags])


@pytest.mark.parametrize("where", ["file", "missing"])
def test_run_dir_with_links_at_every_predictable_name_changes_nothing_outside(where, prepared, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    names = [name for name in FILES if name != "config.json"]
    traps = {name + ".tmp": outside / f"{name}.tmp" for name in FILES}
    traps |= {name: outside / name for name in names if name not in ("latest.pt", "metrics.csv", "episodes.csv")}
    traps |= {f"policies/{name}": outside / name for name in ("000000320.pt", "000000320.pt.tmp")}
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


@pytest.mark.parametrize("name", ["metrics.csv", "episodes.csv", "tensorboard", "policies", "lock"])
def test_run_dir_refuses_a_link_where_a_run_writes_in_place(name, prepared, tmp_path, capsys):
    path, outside = prepared / name, tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    before = sorted(outside.iterdir()) if outside.is_dir() else outside.read_bytes()
    assert resume(prepared) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: run_dir must") and f"{name} must not be a link" in err and err.count("\n") == 1
    assert (sorted(outside.iterdir()) if outside.is_dir() else outside.read_bytes()) == before


def test_run_dir_refuses_a_pipe_in_place_of_a_file(finished, tmp_path):
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


def test_record_video_follows_no_link(finished, tmp_path, monkeypatch):
    def write(path, pictures, fps):
        path.write_bytes(b"video")

    monkeypatch.setitem(WRITERS, ".gif", write)
    (tmp_path / "precious").write_text("precious")
    for name in ("episode.gif", "episode.gif.tmp", ".episode.gif.tmp.gif"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    record_video(finished, tmp_path / "episode.gif")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "episode.gif").read_bytes() == b"video" and not (tmp_path / "episode.gif").is_symlink()


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


def test_run_dir_of_a_killed_start_can_be_used_again_or_resumed(tmp_path, capsys, monkeypatch):
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


def test_run_dir_with_rows_but_no_checkpoint_is_refused(prepared, capsys):
    keep = {name: (prepared / name).read_bytes() for name in ("config.json", "metrics.csv", "episodes.csv")}
    shutil.rmtree(prepared)
    for names in (["metrics.csv"], ["episodes.csv"], list(keep)):
        prepared.mkdir()
        for name in names:
            (prepared / name).write_bytes(keep[name])
        assert cli.train([*TINY, "--run-dir", str(prepared), "--total-env-steps", "80"]) == 2
        err = capsys.readouterr().err
        assert "holds no checkpoint, so no run can continue there; remove it if its rows are not needed" in err
        assert "--resume" not in err and err.count("\n") == 1
        assert {path.name: path.read_bytes() for path in prepared.iterdir()} == {name: keep[name] for name in names}
        shutil.rmtree(prepared)


def test_run_dir_with_a_previous_checkpoint_is_refused_with_resume_as_advice(prepared, capsys):
    (prepared / "latest.pt").unlink()  # the one before is there
    assert cli.train([*TINY, "--run-dir", str(prepared)]) == 2
    assert f"--resume {prepared} resumes it" in capsys.readouterr().err


def test_run_dir_with_events_alone_is_refused(prepared, capsys):
    for path in [*prepared.glob("*.pt"), prepared / "metrics.csv", prepared / "episodes.csv"]:
        path.unlink()  # events alone
    assert cli.train([*TINY, "--run-dir", str(prepared)]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_run_dir_of_a_killed_resume_can_be_resumed(prepared, tmp_path):
    (tmp_path / "states").mkdir()
    states = states_of(lambda: resume(prepared, "--gamma", "0.5"), prepared, tmp_path / "states")
    assert len(states) >= 12
    for state in states[:: 1 + len(states) // 12]:
        assert resume(state) == 0
        steps = [int(row["env_steps"]) for row in rows(state / "metrics.csv")]
        assert steps == sorted(set(steps)) and load_checkpoint(state / "latest.pt")["env_steps"] == 400


def test_run_lock_is_taken_again_in_a_directory_that_was_removed(tmp_path):
    run_dir, refused = tmp_path / "run", []
    run = Trainer(tiny(run_dir, log_every=1e-6, checkpoint_every=80))

    def remove_and_look(rollouts):
        if rollouts == 2:
            shutil.rmtree(run_dir)
        if rollouts == 4:
            with pytest.raises(ValueError, match="in use by another process") as refusal:
                RunLock(run_dir).take()
            refused.append(refusal)

    after_rollout(run, remove_and_look)
    assert run.run().exit_code == 0 and refused
    lock = RunLock(run_dir)
    lock.take()  # free after the run
    lock.release()


def test_a_run_does_not_write_over_one_that_has_begun_in_its_directory_meanwhile(tmp_path):
    first, second = (Trainer(tiny(tmp_path / "run", gamma=gamma)) for gamma in (0.9, 0.98))
    assert first.run().exit_code == 0
    with pytest.raises(ValueError, match=r"run_dir must be new or empty, got .*run: another run has begun there"):
        second.run()
    assert Config.from_json((tmp_path / "run" / "config.json").read_text()).gamma == 0.9


def test_runs_that_begin_together_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = [Trainer(tiny(None)) for _ in range(2)]
    assert begun[0].run_dir != begun[1].run_dir
    assert [trainer.run().exit_code for trainer in begun] == [0, 0]


def test_a_run_stays_in_its_directory_where_the_program_changes_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    trainer = Trainer(tiny("runs/one", log_every=1e-6))
    for progress in trainer:
        if progress.env_steps == 160:
            monkeypatch.chdir(tmp_path / "elsewhere")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert len(rows(tmp_path / "runs/one/metrics.csv")) == 6
    assert load_checkpoint(tmp_path / "runs/one/latest.pt")["env_steps"] == 480
    assert "run directory runs/one" in capsys.readouterr().out


def test_run_lock_that_another_process_has_taken_ends_the_run(tmp_path):
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
lock = RunLock(Path(sys.argv[1]))
lock.take()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def no_flock(monkeypatch):
    """A network file system: no locks, and two files cannot be exchanged."""

    def flock(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    modules = [module for name, module in sys.modules.items() if name.startswith("filelock")]
    having = [module for module in modules if "exchange_names" in vars(module)]  # differs from version to version
    assert having
    for module in having:
        monkeypatch.setattr(module, "exchange_names", lambda *args: False)


@pytest.mark.filterwarnings("error::UserWarning")  # of a fallback of filelock
def test_run_lock_of_a_dead_process_is_taken_over_without_system_locks(tmp_path, no_flock):
    other = subprocess.Popen([sys.executable, "-W", "error", "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE)
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


@pytest.mark.filterwarnings("error::UserWarning")  # of a fallback of filelock
def test_run_lock_of_a_dead_process_goes_to_one_of_two(tmp_path, no_flock, monkeypatch):
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


@pytest.mark.filterwarnings("error::UserWarning")  # of a fallback of filelock
def test_run_lock_without_system_locks_can_be_taken_twice_and_made_again(tmp_path, no_flock):
    run_dir, lock = tmp_path / "run", RunLock(tmp_path / "run")
    lock.take()
    held = (run_dir / "lock").stat()
    lock.take()  # a resume does: to read the checkpoint, and to write
    assert os.path.samestat(held, (run_dir / "lock").stat())
    shutil.rmtree(run_dir)
    lock.keep()
    with pytest.raises(ValueError, match="in use by another process"):
        RunLock(run_dir).take()
    lock.release()
    assert not any(run_dir.iterdir())


@pytest.mark.parametrize("error, locks", [(errno.ENOSYS, False), (errno.EOPNOTSUPP, False), (errno.ENOLCK, True)])
def test_a_file_system_has_no_locks_only_where_it_says_so(error, locks, tmp_path, monkeypatch):
    assert directory._has_locks(tmp_path) and directory._has_locks(tmp_path / "missing")

    def flock(*args):
        raise OSError(error, "refused")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert directory._has_locks(tmp_path) is locks and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    ["", f"{os.getpid()}\n{socket.gethostname()}\n", "7\nanother-host\n"],
    ids=["empty", "this process", "another host"],
)
@pytest.mark.filterwarnings("error::UserWarning")  # of a fallback of filelock
def test_run_lock_that_may_be_held_says_what_to_do(content, tmp_path, no_flock):
    (tmp_path / "lock").write_text(content)
    with pytest.raises(ValueError, match=f"if no process on any host uses it, remove {tmp_path / 'lock'}"):
        RunLock(tmp_path).take()
    (tmp_path / "lock").unlink()
    lock = RunLock(tmp_path)
    lock.take()
    lock.release()


def test_run_outputs_show_changed_settings_and_keep_the_old_ones(prepared, capsys):
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

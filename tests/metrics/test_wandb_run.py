"""Rows for Weights & Biases: what is sent, what a resume continues, and what happens where wandb fails."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from runs import TINY, row_of, rows, tiny
from toys import wait_for

from a2c.cli import commands as cli
from a2c.config.config import Config
from a2c.config.extras import has_extra
from a2c.metrics import wandb_process, wandb_run
from a2c.metrics.logger import TAGS, RunLogger
from a2c.metrics.wandb_process import send
from a2c.metrics.wandb_run import WandbRun, check_wandb, run_id
from a2c.run.trainer import Trainer

installed = has_extra("wandb")
needs_wandb = pytest.mark.skipif(not installed, reason="needs the package wandb")


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """Nothing that a test does may reach a server, or depend on who is logged in here."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setattr(wandb_run, "PATIENCE", 120.0)  # on a busy machine
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def records(path):
    """The records of a .wandb file: a header of 7 bytes, then blocks of 32 KiB as LevelDB's log has them."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, part, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        left = (1 << 15) - at % (1 << 15)
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(part))
            part = b""
    return found


def logged(run_dir):
    """`{step: {name: value}}` of every session of a run, the ids of the sessions, and the config of the first."""
    found, ids, config = {}, [], {}
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        for record in records(path):
            if record.HasField("run"):
                ids.append(record.run.run_id)
                config = config or {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                found[record.history.step.num] = {name: json.loads(text) for name, text in items.items()}
    return found, ids, config


@needs_wandb
def test_a_run_and_its_resume_are_one_run_of_wandb_with_all_rows_and_settings(tmp_path, capsys):
    run_dir = tmp_path / "run"
    args = [*TINY, "--no-progress", "--log-every", "0.000001", "--wandb"]
    assert cli.train([*args, "--total-env-steps", "240", "--run-dir", str(run_dir)]) == 0
    assert f"wandb: offline; to upload: wandb sync {run_dir / 'wandb'}/offline-run-" in capsys.readouterr().out
    _, _, config = logged(run_dir)
    assert config["env"] == "CartPole-v1" and config["wandb"] is True and config["total_env_steps"] == 240
    assert set(config) - {"_wandb"} == set(vars(Config()))
    time.sleep(1.1)  # the directory of a session is named by the second
    assert cli.train(["--resume", str(run_dir), "--total-env-steps", "480"]) == 0
    found, ids, _ = logged(run_dir)
    assert set(ids) == {run_id(run_dir)} and len(ids) >= 2
    kept = rows(run_dir / "metrics.csv")
    assert list(found) == [int(row["env_steps"]) for row in kept] == [80, 160, 240, 320, 400, 480]
    for row in kept:
        names = {name for name in row if name != "env_steps" and row[name]}
        sent = {name: value for name, value in found[int(row["env_steps"])].items() if not name.startswith("_")}
        assert set(sent) == {TAGS[name] for name in names}
        assert all(sent[TAGS[name]] == pytest.approx(float(row[name]), rel=1e-4, abs=0.01) for name in names)


@needs_wandb
def test_a_run_that_is_not_logged_in_says_so_once_and_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    assert Trainer(tiny(tmp_path / "run", wandb=True, log_every=1e-6)).run().exit_code == 0
    out = capsys.readouterr().out
    assert out.count("wandb:") == 1 and "logging has stopped (not logged in: use `wandb login`" in out
    assert len(rows(tmp_path / "run" / "metrics.csv")) == 6


def script(monkeypatch, tmp_path, text):
    """Replace the process that talks to wandb."""
    path = tmp_path / "instead.py"
    path.write_text(text)
    monkeypatch.setattr(wandb_run, "SCRIPT", path)


ENDS, HANGS, TALKS = "raise SystemExit(1)", "import time; time.sleep(600)", "print(chr(0x2713), flush=True)"
WRITES = "import sys, pathlib; pathlib.Path('got').write_text(sys.stdin.read())"


@pytest.mark.parametrize("text", [ENDS, HANGS, TALKS])
def test_a_process_that_fails_or_hangs_costs_no_row_and_hardly_any_time(text, tmp_path, monkeypatch):
    script(monkeypatch, tmp_path, text)
    if text == HANGS:
        monkeypatch.setattr(wandb_run, "PATIENCE", 0.5)
    logger = RunLogger(tmp_path, Config(wandb=True))
    began = time.monotonic()
    for i in range(400):  # more than a pipe takes
        logger.add_metrics(row_of(10 * i))
        logger.write()
    logger.close()
    logger.close()
    assert time.monotonic() - began < 10
    assert len(rows(tmp_path / "metrics.csv")) == 400
    messages = logger.messages()
    assert logger.messages() == [] and logger._wandb._output.closed
    if text == HANGS:
        assert messages == ["wandb: not every row has been sent yet; a process goes on trying for a minute or two"]
        os.killpg(logger._wandb._process.pid, signal.SIGKILL)
        logger._wandb._process.wait()
    else:
        assert messages == (["✓"] if text == TALKS else [])


def test_rows_arrive_in_order_without_what_is_not_finite(tmp_path, monkeypatch):
    script(monkeypatch, tmp_path, WRITES)
    monkeypatch.chdir(tmp_path)
    run = WandbRun(tmp_path, Config(seed=7))
    for i in range(5000):
        run.add(i, {"score/reward": 0.1 * i, "loss/loss_total": math.nan, "score/best_reward_100": -math.inf})
    run.close()
    first, *lines = (tmp_path / "got").read_text().splitlines()
    arguments = json.loads(first)
    assert (arguments["project"], arguments["name"], arguments["dir"]) == ("a2c", tmp_path.name, str(tmp_path))
    assert arguments["config"]["seed"] == 7 and arguments["id"] == run_id(tmp_path)
    assert [json.loads(line) for line in lines] == [[i, {"score/reward": 0.1 * i}] for i in range(5000)]


def test_the_environment_may_name_the_project_and_the_run(tmp_path, monkeypatch):
    script(monkeypatch, tmp_path, WRITES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_PROJECT", "games")
    monkeypatch.setenv("WANDB_NAME", "the best one")
    WandbRun(tmp_path, Config()).close()
    arguments = json.loads((tmp_path / "got").read_text())
    assert (arguments["project"], arguments["name"]) == ("games", "the best one")


def test_the_process_sends_its_rows_though_nobody_listens_any_more():
    code = f"import sys; sys.path.insert(0, {str(wandb_run.SCRIPT.parent)!r}); import wandb_process\n"
    code += "wandb_process.send = lambda lines, tell: (next(lines), tell('late'), sys.exit(7))\nwandb_process.main()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        process.stdout.close()
        process.stdin.write(b"row\n")
        process.stdin.close()
        assert process.wait(60) == 7


def test_the_process_ends_with_the_training_that_is_killed_and_outlives_its_ctrl_c(tmp_path, monkeypatch):
    script(monkeypatch, tmp_path, "import sys; print('read', len(sys.stdin.read()), flush=True)")
    run = WandbRun(tmp_path, Config())
    assert os.getpgid(run._process.pid) != os.getpgid(0)  # where a terminal sends its Ctrl-C
    run._input.close()  # as the system does
    run._process.wait(10)
    assert run.messages()[0].startswith("read ")


def test_the_id_of_a_run_is_kept_and_a_damaged_one_is_replaced(tmp_path):
    first = run_id(tmp_path)
    assert run_id(tmp_path) == first and len(first) == 8
    for damaged in (b"", b"../../x\n", b"\xff\xfe", b"x" * 70):
        (tmp_path / "wandb" / "id").write_bytes(damaged)
        assert run_id(tmp_path) != first and run_id(tmp_path) == run_id(tmp_path)


def test_a_link_in_place_of_the_directory_is_refused(tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").symlink_to(tmp_path / "elsewhere")
    assert cli.train([*TINY, "--total-env-steps", "80", "--wandb", "--run-dir", str(tmp_path / "run")]) == 2
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_missing_package_is_refused_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(wandb_run, "has_extra", lambda name: False)
    check_wandb(Config())
    assert cli.train([*TINY, "--total-env-steps", "80", "--wandb", "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: wandb must be off ") and 'pip install "a2c[wandb]"' in error
    assert not (tmp_path / "run").exists()


def test_send_tells_what_fails():
    told = []
    send([], told.append)
    send(["nonsense"], told.append)
    assert len(told) == 2 and all(text.startswith("wandb: logging has stopped (") for text in told)


def test_send_leaves_out_the_rows_that_a_resumed_run_replays(monkeypatch):
    sent, told = [], []
    run = SimpleNamespace(
        step=200, log=lambda values, step: sent.append((step, values)), finish=lambda: sent.append("finished")
    )
    monkeypatch.setattr(wandb_process, "_begin", lambda arguments, tell: run)
    send(["{}", *(json.dumps([step, {"score/reward": step / 2}]) for step in (100, 200, 300))], told.append)
    assert sent == [(200, {"score/reward": 100.0}), (300, {"score/reward": 150.0}), "finished"] and not told


def test_without_the_package_the_process_says_so(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "run").mkdir()
    run = WandbRun(tmp_path / "run", Config())
    wait_for(lambda: run._process.poll() is not None)
    assert "No module named 'wandb'" in run.messages()[0]


def test_where_wandb_cannot_be_started_tensorboard_misses_nothing(tmp_path):
    (tmp_path / "wandb").write_text("a file")
    logger = RunLogger(tmp_path, Config(wandb=True))
    logger.add_metrics(row_of(100))
    with pytest.raises(OSError, match="directory"):
        logger.write()
    logger.close()
    written = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"score/reward_100" in written


def test_where_tensorboard_cannot_be_written_wandb_misses_nothing(tmp_path, monkeypatch):
    (tmp_path / "tensorboard").write_text("a file")
    sent = []
    monkeypatch.setattr(WandbRun, "__init__", lambda self, run_dir, config: None)
    monkeypatch.setattr(WandbRun, "add", lambda self, env_steps, points: sent.append(env_steps))
    logger = RunLogger(tmp_path, Config(wandb=True))
    for env_steps in (100, 200):
        logger.add_metrics(row_of(env_steps))
        with pytest.raises(OSError, match="exists"):
            logger.write()
    assert sent == [100, 200]

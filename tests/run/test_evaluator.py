"""Policies are evaluated in a process beside the run, which stays as it is whatever happens to that process."""

import math
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
from runs import after_rollout, rows, tiny
from toys import same, wait_for

from a2c.config.config import Config
from a2c.run import evaluator
from a2c.run.checkpoint import load_checkpoint
from a2c.run.policies import kept_policies
from a2c.run.trainer import Trainer
from a2c.tools.evaluate import evaluate

CLOSED = (128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL)  # handled, too early for that, or too late
PARTS = ("network", "optimizer", "algorithm", "scores", "metrics")


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("without") / "run"
    assert Trainer(tiny(run_dir)).run().exit_code == 0
    return load_checkpoint(run_dir / "latest.pt")


@pytest.fixture(autouse=True)
def _usual_priority(monkeypatch):
    """With the lowest priority beside other tests, the process would need minutes to load torch."""
    assert "os.nice(19); " in evaluator.CODE
    monkeypatch.setattr(evaluator, "CODE", evaluator.CODE.replace("os.nice(19); ", ""))


def wait_for_rows(run_dir, count, process):
    end = time.monotonic() + 120
    while len(rows(run_dir / "evaluations.csv") if (run_dir / "evaluations.csv").exists() else []) < count:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)


def test_a_run_with_evaluations_ends_with_the_same_parameters(without, tmp_path):
    trainer = Trainer(tiny(tmp_path / "run", eval_every=160, eval_episodes=3, log_every=1e-6))
    processes = []

    def wait(rollouts):
        processes.append(trainer.outputs.evaluator.process)
        if rollouts in (3, 6):  # the policies of the rollouts 2 and 4, or both at once, are kept by then
            wait_for_rows(tmp_path / "run", rollouts // 3, processes[0])

    after_rollout(trainer, wait)
    assert trainer.run().exit_code == 0 and processes[0].returncode in CLOSED
    state = load_checkpoint(tmp_path / "run" / "latest.pt")
    assert all(same(state[part], without[part]) for part in PARTS)
    table = rows(tmp_path / "run" / "evaluations.csv")
    written = [row["eval_score"] for row in rows(tmp_path / "run" / "metrics.csv")]
    assert written[0] == "" and float(table[0]["mean"]) in [float(mean) for mean in written if mean]
    assert [row["env_steps"] for row in table[:2]] == ["160", "320"] and list(kept_policies(tmp_path / "run"))[:1] == [
        160
    ]
    scores = evaluate(tmp_path / "run" / "policies" / "000000160.pt", 3, threads=1)
    assert math.isclose(float(table[0]["mean"]), scores.mean()) and table[0]["episodes"] == "3"


def test_a_run_goes_on_when_the_process_dies(without, tmp_path, capsys):
    trainer, told = Trainer(tiny(tmp_path / "run", eval_every=160, log_every=1e-6)), []

    def kill(rollouts):
        if rollouts == 2:
            os.kill(trainer.outputs.evaluator.process.pid, signal.SIGKILL)
            trainer.outputs.evaluator.process.wait()
        told.append(capsys.readouterr().out.count("evaluations.csv is incomplete: its process ended"))

    after_rollout(trainer, kill)
    assert trainer.run().exit_code == 0
    assert told[2] == 1 and sum(told) == 1  # at the next row, once
    state = load_checkpoint(tmp_path / "run" / "latest.pt")
    assert all(same(state[part], without[part]) for part in PARTS)


def test_a_run_goes_on_where_no_process_can_be_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluator.sys, "executable", str(tmp_path / "none"))
    assert Trainer(tiny(tmp_path / "run", eval_every=160)).run().exit_code == 0
    assert list(kept_policies(tmp_path / "run")) == [160, 320, 480]


def test_a_run_that_goes_back_drops_the_later_evaluations(tmp_path):
    run_dir, table = tmp_path / "run", "env_steps,episodes,mean,standard_deviation,min,max\n160,3,1,0,1,1\n"
    run_dir.mkdir()
    (run_dir / "evaluations.csv").write_text(table + "320,3,2,0,2,2\n")
    one = evaluator.Evaluator(run_dir, Config(eval_every=160, env="CartPole-v1"))
    assert one.metrics(480) == {"eval_score": 2.0} and one.metrics(200) == {"eval_score": 1.0} and one.metrics(0) == {}
    one.start(320)
    first = one.process
    one.rewind(200)
    try:
        assert first.returncode in CLOSED and one.process is not first
        wait_for(lambda: (run_dir / "evaluations.csv").read_text().replace("\r", "") == table, 60)
        assert one.metrics(480) == {"eval_score": 1.0}
    finally:
        one.close()


def test_the_process_has_a_group_of_its_own_which_no_ctrl_c_reaches_in_the_session_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "CODE", "import sys; sys.stdin.read()")
    one = evaluator.Evaluator(tmp_path, Config(eval_every=160))
    one.start(0)
    try:
        pid = one.process.pid
        assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0)
    finally:
        one.close()


HOLDS_A_FOLDER = """
import signal, sys, tempfile
from a2c.processes.exits import exit_on_sigterm

with exit_on_sigterm(), tempfile.TemporaryDirectory(dir="."):
    if {ignores}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("begun", "w").close()
    sys.stdin.read()
"""


@pytest.mark.parametrize(("ignores", "status"), [(False, 128 + signal.SIGTERM), (True, -signal.SIGKILL)])
def test_the_process_removes_its_temporary_files_or_is_killed(ignores, status, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluator, "CODE", HOLDS_A_FOLDER.format(ignores=ignores))
    monkeypatch.setattr(evaluator, "PATIENCE", 1.0 if ignores else 60.0)
    one = evaluator.Evaluator(tmp_path, Config(eval_every=160))
    one.start(0)
    process = one.process
    wait_for((tmp_path / "begun").exists, 60)
    one.close()
    assert process.returncode == status and len(list(tmp_path.iterdir())) == 1 + ignores


def test_a_run_that_goes_on_without_evaluations_drops_the_later_ones(tmp_path):
    trainer = Trainer(tiny(tmp_path / "run", stop_after=160))
    assert trainer.run().exit_code == 0
    table, text = tmp_path / "run" / "evaluations.csv", "env_steps,episodes,mean,standard_deviation,min,max\r\n"
    table.write_bytes((text + "160,3,1,0,1,1\r\n320,3,2,0,2,2\r\n").encode())
    assert Trainer.resume(tmp_path / "run", stop_after=0).run().exit_code == 0
    assert table.read_bytes().decode() == text + "160,3,1,0,1,1\r\n"


@pytest.mark.parametrize("text", ["", "env_steps,mean\n", "env_steps,episodes\n1,2\n", "env_steps,mean\n100,nan\n"])
def test_a_table_without_a_mean_gives_no_metric(text, tmp_path):
    (tmp_path / "evaluations.csv").write_text(text)
    assert evaluator.Evaluator(tmp_path, Config(eval_every=160)).metrics(480) == {}
    (tmp_path / "evaluations.csv").unlink()
    assert evaluator.Evaluator(tmp_path, Config(eval_every=160)).metrics(480) == {}


def test_eval_every_is_a_multiple_of_keep_policy_every():
    config = Config(keep_policy_every=100, eval_every=300)
    with pytest.raises(ValueError, match=r"eval_every must be a multiple of keep_policy_every \(100\).*got 250"):
        replace(config, eval_every=250)
    assert Config(eval_every=250).keep_policy_every == 0 and Config().eval_every == 0


def test_the_process_finds_the_modules_of_this_one_and_none_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "a2c").mkdir()
    (tmp_path / "a2c" / "__init__.py").write_text("open('executed', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluator, "CODE", "import a2c.config, runs")
    monkeypatch.setattr(evaluator.sys, "path", [path for path in sys.path if path])
    one = evaluator.Evaluator(tmp_path, Config(eval_every=160))
    one.start(0)
    assert one.process.wait(60) == 0
    one.close()
    assert not (tmp_path / "executed").exists()

"""The kept policies of a run: in order, until the first that reaches the target, and on where it stopped."""

import csv
import signal
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from disks import Disk
from runs import tiny

from a2c.config.config import Config
from a2c.processes.start import module_environ
from a2c.run.checkpoint import CheckpointError
from a2c.run.policies import kept_policies
from a2c.run.trainer import Trainer
from a2c.tools import frozen
from a2c.tools.evaluate import evaluate
from a2c.tools.frozen import evaluate_kept, evaluated, first_frozen


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 640 decisions (8 rollouts) that kept a policy every 160, but none at its end."""
    run_dir = tmp_path_factory.mktemp("frozen") / "run"
    trainer = Trainer(replace(tiny(run_dir), total_env_steps=560, keep_policy_every=160))
    assert trainer.run().exit_code == 0
    assert list(kept_policies(run_dir)) == [160, 320, 480]
    return run_dir


@pytest.fixture
def run_dir(trained):
    (trained / "evaluations.csv").unlink(missing_ok=True)
    return trained


@pytest.fixture
def played(monkeypatch):
    """Policies in the order in which they were evaluated; the scores of each are set by `played.scores`."""

    class Played(list):
        scores: dict[str, list[float]]

    played = Played()

    def fake(run_dir, episodes, *, checkpoint, threads):
        played.append(checkpoint)
        if checkpoint not in played.scores:
            raise KeyboardInterrupt
        return np.array(played.scores[checkpoint])

    monkeypatch.setattr(frozen, "evaluate", fake)
    return played


A, B, C, LAST = "policies/000000160.pt", "policies/000000320.pt", "policies/000000480.pt", "latest.pt"


def test_policies_are_evaluated_in_order_until_the_first_that_reaches_the_target(run_dir, played):
    played.scores = {A: [1.0, 3.0], B: [4.0, 6.0]}
    evaluate_kept(run_dir, 5.0)
    assert played == [A, B] and first_frozen(run_dir, 5.0) == 320
    with open(run_dir / "evaluations.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{k: float(v) for k, v in row.items()} for row in rows] == [
        {"env_steps": 160, "episodes": 2, "mean": 2, "standard_deviation": 1, "min": 1, "max": 3},
        {"env_steps": 320, "episodes": 2, "mean": 5, "standard_deviation": 1, "min": 4, "max": 6},
    ]
    evaluate_kept(run_dir, 5.0)
    assert played == [A, B]  # nothing is left to do


def test_an_evaluation_that_was_stopped_continues_after_its_last_row(run_dir, played):
    played.scores = {A: [1.0]}
    with pytest.raises(KeyboardInterrupt):
        evaluate_kept(run_dir, 5.0)
    with open(run_dir / "evaluations.csv", "a") as file:
        file.write("320,30,9")  # as after a kill
    played.scores = {B: [2.0], C: [3.0], LAST: [4.0]}
    evaluate_kept(run_dir, 5.0)
    assert played == [A, B, B, C, LAST]
    assert evaluated(run_dir) == {160: 1.0, 320: 2.0, 480: 3.0, 560: 4.0} and first_frozen(run_dir, 5.0) is None


def test_the_last_policy_of_a_run_counts_though_it_was_not_due_to_be_kept(run_dir, played):
    played.scores = {A: [1.0], B: [1.0], C: [1.0], LAST: [9.0]}
    evaluate_kept(run_dir, 5.0)
    assert first_frozen(run_dir, 5.0) == 560


def test_policies_from_before_the_first_training_episode_at_the_target_are_not_played(run_dir, played, monkeypatch):
    played.scores = {B: [1.0], C: [9.0]}
    # 4 environments, rollouts of 20: the episode that reaches 5 ended after 321 to 400 decisions, so it began after
    # 261 to 340, with the policy of 200 to 320.
    columns = {"score": [4.0, 5.0, 6.0], "length": [4.0, 15.0, 10.0], "env_steps": [80.0, 400.0, 480.0]}
    episodes = {name: np.array(column) for name, column in columns.items()}
    monkeypatch.setattr(frozen, "read_episodes", lambda path: episodes)
    evaluate_kept(run_dir, 5.0)
    assert played == [B, C]
    (run_dir / "evaluations.csv").unlink()
    played.scores = {LAST: [1.0]}
    evaluate_kept(run_dir, 7.0)
    assert played == [B, C, LAST]  # no episode reached 7


def test_a_run_that_was_continued_plays_what_was_not_wanted_before(run_dir, played, monkeypatch):
    played.scores = {B: [1.0], C: [9.0], LAST: [1.0]}
    score, columns = np.array([5.0]), {"length": np.array([15.0]), "env_steps": np.array([400.0])}
    monkeypatch.setattr(frozen, "read_episodes", lambda path: {"score": score, **columns})
    evaluate_kept(run_dir, 7.0)
    assert played == [LAST]
    score[0] = 7.0  # with the policy of 200 decisions or a later one
    evaluate_kept(run_dir, 7.0)
    assert played == [LAST, B, C] and first_frozen(run_dir, 7.0) == 480


def test_means_are_those_of_evaluate(run_dir):
    evaluate_kept(run_dir, -1.0, threads=1)
    expected = evaluate(run_dir, frozen.EPISODES, checkpoint=A, threads=1)
    assert evaluated(run_dir) == {160: expected.mean()}


def test_its_process_ends_when_its_input_is_closed(run_dir):
    with subprocess.Popen(frozen.command(run_dir, np.inf, 1), stdin=subprocess.PIPE, env=module_environ()) as process:
        process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM and not (run_dir / "evaluations.csv").exists()


def test_its_process_imports_nothing_of_the_working_directory(run_dir, tmp_path, monkeypatch):
    for name in ("json", "torch", "a2c"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    arguments = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "env": module_environ(), "cwd": tmp_path}
    with subprocess.Popen(frozen.command(tmp_path, np.inf, 1), **arguments) as process:
        process.communicate(timeout=120)
    assert process.returncode and not (tmp_path / "executed").exists()


def test_a_row_that_is_no_number_is_not_a_result(run_dir):
    (run_dir / "evaluations.csv").write_text("env_steps,mean\ninf,9\n160,nan\n320,7\n")
    assert evaluated(run_dir) == {320: 7.0}


def test_while_a_run_trains_the_newest_policy_that_is_due_is_evaluated(run_dir, played, monkeypatch):
    monkeypatch.setattr(frozen, "evaluate", lambda path, episodes, *, threads: np.full(episodes, float(path.stem)))
    evaluations = frozen.Evaluations(run_dir, 160, 2, after=0)
    assert evaluations.evaluate_newest() and not evaluations.evaluate_newest()
    assert evaluated(run_dir) == {480: 480.0}  # the ones before are left out
    assert not frozen.Evaluations(run_dir, 160, 2, after=480).evaluate_newest()  # a resumed run
    assert not frozen.Evaluations(run_dir, 1000, 2, after=0).evaluate_newest() and evaluated(run_dir) == {}


def test_a_row_waits_for_a_disk_that_refuses_it(run_dir, monkeypatch):
    monkeypatch.setattr(frozen, "evaluate", lambda path, episodes, *, threads: np.full(episodes, 7.0))
    evaluations = frozen.Evaluations(run_dir, 160, 2, after=0)
    disk = Disk(run_dir)
    disk.full = True
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", disk.open)
        assert evaluations.evaluate_newest()
    assert evaluated(run_dir) == {}
    assert not evaluations.evaluate_newest() and evaluated(run_dir) == {480: 7.0}


def test_a_policy_that_cannot_be_played_is_left_out(run_dir, monkeypatch):
    def fail(path, episodes, *, threads):
        raise CheckpointError("removed")

    monkeypatch.setattr(frozen, "evaluate", fail)
    evaluations = frozen.Evaluations(run_dir, 160, 2, after=0)
    assert evaluations.evaluate_newest() and not evaluations.evaluate_newest() and evaluated(run_dir) == {}


def test_a_policy_of_an_unknown_environment_ends_the_evaluations(run_dir, monkeypatch):
    def fail(path, episodes, *, threads):
        raise ValueError("env must be a registered Gymnasium id")

    monkeypatch.setattr(frozen, "evaluate", fail)
    with pytest.raises(ValueError, match="env must be"):
        frozen.Evaluations(run_dir, 160, 2, after=0).evaluate_newest()


def test_the_first_policy_to_play_is_two_rollouts_before_a_training_episode_at_the_target():
    # 4 environments, rollouts of 20: 15 decisions, and at most 19 more in their first and in their last rollout.
    episodes = {"score": np.array([5.0]), "length": np.array([15.0]), "env_steps": np.array([400.0])}
    config = Config(num_envs=4, rollout_steps=20)
    assert frozen.first_candidate(episodes, 5.0, config) == 400 - 4 * (15 + 2 * 20)
    assert frozen.first_candidate(episodes, 5.1, config) == np.inf


def test_a_policy_is_due_after_each_multiple_however_late_the_one_before_was(tmp_path, monkeypatch):
    kept, played = {}, []
    monkeypatch.setattr(frozen, "kept_policies", lambda run_dir: kept)
    monkeypatch.setattr(frozen, "evaluate", lambda path, *_, **__: played.append(path) or np.zeros(2))
    evaluations = frozen.Evaluations(tmp_path, 150, 2, after=0)
    for steps in (200, 300, 400, 500):
        kept[steps] = steps
        evaluations.evaluate_newest()
    assert played == [200, 300, 500]


def test_a_resumed_run_evaluates_a_policy_that_has_no_row_yet(run_dir, monkeypatch):
    monkeypatch.setattr(frozen, "evaluate", lambda path, episodes, *, threads: np.full(episodes, 7.0))
    assert frozen.Evaluations(run_dir, 160, 2, after=480).evaluate_newest() and evaluated(run_dir) == {480: 7.0}

"""Short runs from start to end: their files, seeds, signals, and how they are resumed and evaluated."""

import json
import os
import signal

import psutil
import pytest
import torch
from runs import TINY, rows, started, tiny
from toys import wait_for

import a2c
from a2c.cli import commands as cli
from a2c.config.config import Config
from a2c.metrics.logger import METRICS
from a2c.run.checkpoint import load_checkpoint
from a2c.run.outputs import RunOutputs
from a2c.run.trainer import Trainer


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run of 480 decisions of CartPole."""
    run_dir = tmp_path_factory.mktemp("runs") / "tiny"
    assert Trainer(tiny(run_dir, log_every=1e-6)).run().exit_code == 0
    return run_dir


def test_trainer_writes_every_file(run_dir):
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        "config.json",
        "about.json",
        "metrics.csv",
        "episodes.csv",
        "tensorboard",
        "latest.pt",
        "previous.pt",
        "curve.png",
        "lock",
    }
    saved = Config.from_json((run_dir / "config.json").read_text(encoding="utf-8"))
    assert saved == tiny(run_dir, log_every=1e-6, network="mlp", lstm_units=16, log_eps=0.0)
    assert list((run_dir / "tensorboard").iterdir())


def test_trainer_writes_every_metric(run_dir):
    written = rows(run_dir / "metrics.csv")
    assert [int(row["env_steps"]) for row in written] == [80, 160, 240, 320, 400, 480]  # 4 environments, 20 steps
    assert [int(row["updates"]) for row in written] == [4, 8, 12, 16, 20, 24]
    last = written[-1]
    assert set(last) == set(METRICS)
    assert [name for name, text in last.items() if not text] == ["best_reward_100", "eval_score"]  # none yet
    # From 0.001 to a tenth of it at 0.3 of the run, after 144 decisions.
    rates = [float(row["learning_rate"]) for row in written[:4]]
    assert rates == pytest.approx([0.0005, 0.0001, 0.0001, 0.0001], rel=1e-5)
    assert 0.1 < sum(float(last[f"share_{stage}"]) for stage in ("env", "act", "learn")) <= 1.0
    assert float(last["speed"]) > 0 and float(last["entropy"]) < 0.6932  # below log 2


def test_trainer_writes_every_episode(run_dir):
    episodes, last = rows(run_dir / "episodes.csv"), rows(run_dir / "metrics.csv")[-1]
    assert len(episodes) == int(last["episodes"]) > 5
    lengths = [int(episode["length"]) for episode in episodes]
    assert [float(episode["score"]) for episode in episodes] == lengths and 480 - 4 * 100 < sum(lengths) <= 480
    assert float(last["reward"]) == lengths[-1] and float(last["reward_100"]) == pytest.approx(
        sum(lengths) / len(lengths), rel=1e-4
    )


def test_trainer_with_the_same_seed_gives_the_same_bits(run_dir, tmp_path):
    Trainer(tiny(tmp_path / "same")).run()
    Trainer(tiny(tmp_path / "other", seed=1)).run()
    first, same, other = (
        load_checkpoint(path / "latest.pt")["network"] for path in (run_dir, tmp_path / "same", tmp_path / "other")
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["policy.0.weight"], other["policy.0.weight"])


def test_trainer_changes_every_parameter(run_dir):
    untrained = Trainer(tiny(run_dir / "unused"))
    untrained.close()
    fresh = untrained.learner.net.state_dict()
    trained = load_checkpoint(run_dir / "latest.pt")["network"]
    assert all(not torch.equal(fresh[name], trained[name]) for name in fresh)


def test_trainer_resumes_in_the_same_directory(tmp_path, capsys):
    run_dir = tmp_path / "run"
    flags = [*TINY, "--log-every", "0.000001", "--lr-final", "1"]
    assert cli.train([*flags, "--total-env-steps", "240", "--run-dir", str(run_dir)]) == 0
    before = load_checkpoint(run_dir / "latest.pt")
    assert cli.train(["--resume", str(run_dir), "--total-env-steps", "400"]) == 0
    assert "resumed" in capsys.readouterr().out
    after = load_checkpoint(run_dir / "latest.pt")
    assert (before["env_steps"], before["updates"]) == (240, 12)
    assert (after["env_steps"], after["updates"]) == (400, 20)
    assert after["seconds"] > before["seconds"] and after["scores"]["episodes"] > before["scores"]["episodes"]
    steps = after["optimizer"]["state"][0]["step"]
    assert int(steps) == 20  # Adam's moments went on too
    assert [int(row["env_steps"]) for row in rows(run_dir / "metrics.csv")] == [80, 160, 240, 320, 400]
    assert len(rows(run_dir / "episodes.csv")) == after["scores"]["episodes"]
    assert list(tmp_path.iterdir()) == [run_dir]


def test_trainer_stops_at_its_target_and_keeps_the_best_policy(tmp_path):
    trainer = Trainer(tiny(tmp_path / "run", total_env_steps=100_000, target_score=5.0, num_envs=8))
    assert trainer.run().exit_code == 0
    assert trainer.scores.episodes >= 100 and trainer.learner.env_steps < 10_000  # random play scores 20 or so
    assert load_checkpoint(tmp_path / "run" / "best.pt")["env_steps"] == trainer.learner.env_steps


def test_trainer_saves_checkpoints_during_the_run(tmp_path, monkeypatch):
    saved = []
    save = RunOutputs.save
    monkeypatch.setattr(
        RunOutputs, "save", lambda self, name, state: saved.append(state["env_steps"]) or save(self, name, state)
    )
    Trainer(tiny(tmp_path / "run", checkpoint_every=150)).run()
    assert saved == [0, 160, 320, 480]


def test_trainer_loses_nothing_at_a_signal_while_a_row_is_written(tmp_path, monkeypatch):
    trainer = Trainer(tiny(tmp_path / "run", log_every=1e-6))
    monkeypatch.setattr("a2c.run.outputs.Display.show", lambda self, row: signal.raise_signal(signal.SIGINT))
    assert trainer.run().exit_code == 130
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] == trainer.learner.env_steps == 80


def test_trainer_with_the_book_preset_learns_from_sliding_windows(tmp_path):
    flags = ["--preset", "book", "--env", "CartPole-v1", "--backend", "sync", "--num-envs", "4", "--threads", "1"]
    assert cli.train([*flags, "--total-env-steps", "332", "--run-dir", str(tmp_path / "run")]) == 0
    state = load_checkpoint(tmp_path / "run" / "latest.pt")
    # A window of 4 is complete after its fourth decision: up to 3 decisions in each environment still wait.
    assert state["env_steps"] == 332 and state["updates"] == 10
    assert json.loads(state["config"])["sliding_batch"] == 32


def test_trainer_with_the_pong_preset(tmp_path):
    flags = ["--preset", "pong-fast", "--num-envs", "4", "--threads", "2", "--total-env-steps", "160"]
    assert cli.train([*flags, "--run-dir", str(tmp_path / "run")]) == 0
    state = load_checkpoint(tmp_path / "run" / "latest.pt")
    assert (state["env_steps"], state["updates"]) == (512, 36)
    assert state["network"]["normalizer.count"] > 0 and state["input_shape"] == [4, 42, 42]
    assert not (tmp_path / "run" / "curve.png").exists()  # no episode is finished yet


def test_evaluate_command_prints_the_scores_of_a_run(run_dir, capsys):
    assert cli.main(["evaluate", str(run_dir), "--episodes", "13"]) == 0
    lines = capsys.readouterr().out
    assert lines.startswith(
        f"policy    {run_dir}/latest.pt, after 480 decisions\nprotocol  13 episodes of CartPole-v1, "
    )
    assert all(name in lines for name in ("sampled actions", "95 % interval", "standard deviation", "median", "length"))
    assert cli.main(["evaluate", str(run_dir), "--episodes", "13"]) == 0
    assert capsys.readouterr().out == lines  # seeded
    assert cli.main(["evaluate", str(run_dir), "--episodes", "13", "--seed", "7"]) == 0
    assert capsys.readouterr().out != lines


def test_evaluate_prints_protocol_and_every_score_as_json(run_dir, capsys):
    assert cli.main(["evaluate", str(run_dir), "--episodes", "13", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    scores, (low, high) = summary["scores"], summary["interval"]
    assert (
        scores == a2c.evaluate(run_dir, 13).tolist() == a2c.evaluate(run_dir / "latest.pt", 13).tolist()
        and len(summary["lengths"]) == 13
    )
    assert summary["mean"] == pytest.approx(sum(scores) / 13) and low <= summary["mean"] <= high
    assert (summary["min"], summary["max"], summary["episodes"]) == (min(scores), max(scores), 13)
    assert (summary["actions"], summary["seed"]) == ("sampled", 10_000)
    assert summary["env_steps"] == load_checkpoint(run_dir / "latest.pt")["env_steps"]
    assert cli.main(["evaluate", str(run_dir), "--episodes", "2", "--json", "--greedy"]) == 0
    assert json.loads(capsys.readouterr().out)["actions"] == "greedy"


def gone(processes):
    psutil.wait_procs(processes, timeout=10)
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


# async and SIGTERM: see test_resume.py
SIGNALS = [("async", signal.SIGINT), pytest.param("native", signal.SIGTERM, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("backend", "number"), SIGNALS)
def test_trainer_saves_and_ends_at_a_signal(backend, number, tmp_path):
    run = started(tmp_path / "run", "--backend", backend)
    wait_for(lambda: run.stdout.readline().count(" steps/s "))
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= (4 if backend == "async" else 0)
    for process in [*children, run]:  # Ctrl-C, systemd and SLURM reach the whole group
        os.kill(process.pid, number)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 128 + number
    assert "Traceback" not in err and "Error" not in err
    assert f"stopped by {signal.Signals(number).name}" in out and "restarted" not in out
    state = load_checkpoint(tmp_path / "run" / "latest.pt")
    assert state["env_steps"] == int(rows(tmp_path / "run" / "metrics.csv")[-1]["env_steps"]) > 0
    assert gone(children)


@pytest.mark.slow  # test_recovery.py has the harder case of workers that hang
def test_trainer_that_is_killed_leaves_no_worker(tmp_path):
    run = started(tmp_path / "run", "--backend", "async")
    wait_for(lambda: run.stdout.readline().count(" steps/s "))
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= 4
    run.kill()
    run.communicate(timeout=60)
    assert gone(children)


def test_trainer_ends_at_a_signal_while_workers_start(tmp_path):
    run = started(tmp_path / "run", "--backend", "async")
    wait_for(lambda: run.stdout.readline().startswith("run directory"))
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130 and "Traceback" not in err


def test_trainer_stops_at_a_gradient_that_is_nan_and_keeps_the_checkpoint(tmp_path):
    trainer = Trainer(tiny(tmp_path / "run", checkpoint_every=80))
    training_step, calls = trainer.algorithm.training_step, []

    def poison_and_step():
        calls.append(1)
        if len(calls) == 3:
            with torch.no_grad():
                trainer.learner.net.value[-1].bias.fill_(float("nan"))
        return training_step()

    trainer.algorithm.training_step = poison_and_step
    with pytest.raises(FloatingPointError, match=r"policy loss is nan at update 9;"):
        trainer.run()
    state = load_checkpoint(tmp_path / "run" / "latest.pt")
    assert state["env_steps"] == 160 and all(p.isfinite().all() for p in state["network"].values())


def test_a_trainer_runs_once(tmp_path):
    trainer = Trainer(tiny(tmp_path / "run"))
    trainer.run()
    with pytest.raises(RuntimeError, match="runs once"):
        trainer.run()
    with pytest.raises(RuntimeError, match="runs once"):
        trainer.start()
    assert trainer.result().exit_code == 0  # of the first run, whatever came after it
    closed = Trainer(tiny(tmp_path / "closed"))
    closed.close()
    with pytest.raises(RuntimeError, match="runs once"):
        closed.run()


def test_trainer_with_deterministic_gives_the_same_bits_and_restores_torch_settings(run_dir, tmp_path):
    assert Trainer(tiny(tmp_path / "run", deterministic=True)).run().exit_code == 0
    assert not torch.are_deterministic_algorithms_enabled()
    plain, strict = (load_checkpoint(path / "latest.pt")["network"] for path in (run_dir, tmp_path / "run"))
    assert all(torch.equal(plain[name], strict[name]) for name in plain)


def test_trainer_warns_once_of_a_policy_that_hardly_explores(tmp_path, capsys):
    trainer = Trainer(tiny(tmp_path / "run", log_every=1e-6))
    with torch.no_grad():
        trainer.learner.net.policy[-1].bias.copy_(torch.tensor([20.0, 0.0]))
    assert trainer.run().exit_code == 0
    out = capsys.readouterr().out
    assert out.count("entropy has fallen below 5% of a uniform policy's") == 1


def test_trainer_without_clipping_reports_gradients(tmp_path):
    assert Trainer(tiny(tmp_path / "run", max_grad_norm=0.0, log_every=1e-6)).run().exit_code == 0
    assert float(rows(tmp_path / "run" / "metrics.csv")[-1]["grad_max"]) > 0


def test_trainer_does_not_save_parameters_that_are_infinite(tmp_path):
    trainer = Trainer(tiny(tmp_path / "run", checkpoint_every=1))
    step = trainer.learner.optimizer.step

    def poison():
        step()
        if trainer.learner.env_steps == 160:
            with torch.no_grad():
                trainer.learner.net.policy[0].weight[0, 0] = float("inf")

    trainer.learner.optimizer.step = poison
    with pytest.raises(FloatingPointError, match="parameters are NaN or infinite after update 12;"):
        trainer.run()
    state = load_checkpoint(tmp_path / "run" / "latest.pt")
    assert state["env_steps"] == 160 and all(p.isfinite().all() for p in state["network"].values())

"""When a run ends, and that a finished run which is resumed starts and changes nothing."""

import pytest

from a2c.algorithms.base import TrainingStats
from a2c.cli import commands as cli
from a2c.cli.flags import parse_config
from a2c.config.config import Config
from a2c.envs.vector_env import Episode
from a2c.metrics.meters import ScoreWindow
from a2c.processes.signals import StopRequest
from a2c.run import trainer
from a2c.run.checkpoint import load_checkpoint
from a2c.run.stop import stop_reason
from a2c.run.trainer import Trainer

FLAGS = ["--preset", "cartpole", "--num-envs", "4", "--no-progress", "--log-every", "0.1"]
ENDS = {
    "target": ["--target-score", "12", "--total-env-steps", "400000"],  # random play scores 20 or so
    "budget": ["--total-env-steps", "1000"],
}
KEPT = ("latest.pt", "previous.pt", "best.pt", "metrics.csv", "episodes.csv", "curve.png", "config.json")


def flags_of(algorithm, run_dir, *more):
    workers = [] if algorithm == "a2c" else ["--workers", "2"]
    return [*FLAGS, "--algorithm", algorithm, *workers, "--run-dir", str(run_dir), *more]


def contents(run_dir):
    return {name: (run_dir / name).read_bytes() for name in KEPT if (run_dir / name).exists()}


@pytest.mark.parametrize("algorithm", ["a2c", "a3c", "ga3c"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_trainer_of_a_finished_run_starts_no_worker_and_changes_no_byte(end, algorithm, tmp_path, capsys, monkeypatch):
    run_dir = tmp_path / "run"
    assert cli.train(flags_of(algorithm, run_dir, *end)) == 0
    before = contents(run_dir)
    assert len(before) >= 6
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(trainer.ALGORITHMS[algorithm], "start", None)
        for _ in range(2):
            assert cli.train(["--resume", str(run_dir)]) == 0
            out = capsys.readouterr().out
            assert "nothing to do at" in out and "resumed at" not in out
            assert contents(run_dir) == before
    state = load_checkpoint(run_dir / "latest.pt")
    more = ["--total-env-steps", "400000", "--target-score", "500", "--stop-after", str(state["env_steps"] + 200)]
    assert cli.train(["--resume", str(run_dir), *more]) == 0
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] >= state["env_steps"] + 200


def test_stop_reason_of_a_target_holds_whatever_episodes_end_later(tmp_path, capsys):
    run_dir = tmp_path / "run"
    whole = Trainer(parse_config(flags_of("a2c", run_dir, "--target-score", "12")))
    whole.algorithm.drain = lambda: TrainingStats(0, [Episode(0, 0.0, 1)] * 100, {})  # episodes that workers finish
    assert whole.run().exit_code == 0 and whole.scores.mean < 12
    assert "CartPole-v1: reached a mean score of" in capsys.readouterr().out
    assert cli.train(["--resume", str(run_dir)]) == 0
    assert "nothing to do at" in capsys.readouterr().out
    again = Trainer(parse_config(["--resume", str(run_dir), "--target-score", "100"]))
    assert not again.stop_reason()
    again.close()


def test_trainer_saves_a_finished_run_after_its_last_row(tmp_path):
    done = []
    flags = ["--total-env-steps", "640", "--checkpoint-every", "1"]
    whole = Trainer(parse_config(flags_of("a2c", tmp_path / "run", *flags)))
    log, save = whole.outputs.log, whole.outputs.save
    whole.algorithm.drain = lambda: done.append("drain") or TrainingStats(0, [], {})
    whole.outputs.log = lambda *args, **kwargs: log(*args, **kwargs) or done.append("log")
    whole.outputs.save = lambda name, state: done.append(state["env_steps"]) or save(name, state)
    assert whole.run().exit_code == 0
    assert done == [0, "log", 128, "log", 256, "log", 384, "log", 512, "log", "drain", "log", 640]


def test_stop_reason_names_signal_target_and_budget():
    scores, stop = ScoreWindow(), StopRequest()
    config = Config(target_score=10.0, stop_after=500, total_env_steps=2000)
    assert stop_reason(config, 499, scores, stop) == ""
    assert stop_reason(config, 1500, scores, stop) == "stopped after 1,500 env_steps"
    scores.add([10.0] * 99)
    assert stop_reason(config, 499, scores, stop) == ""  # 99 episodes are too few
    scores.add([12.0])
    assert stop_reason(config, 499, scores, stop) == "reached a mean score of 10.0"
    scores.add([0.0] * 100)
    assert stop_reason(config, 499, scores, stop) == "reached a mean score of 10.0"
    stop.number = 2
    assert stop_reason(config, 499, scores, stop) == "stopped by SIGINT"
    assert stop_reason(Config(total_env_steps=2000), 2000, scores, StopRequest()) == "all environment steps done"

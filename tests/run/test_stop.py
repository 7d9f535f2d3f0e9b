"""A run that is over stays as it is: resumed, it starts nothing and changes nothing."""

import pytest

from a2c.algorithms.base import TrainingStats
from a2c.cli import commands as cli
from a2c.cli.flags import parse_config
from a2c.envs.vector_env import Episode
from a2c.run import trainer
from a2c.run.checkpoint import load_checkpoint
from a2c.run.trainer import Trainer

FLAGS = ["--preset", "cartpole", "--num-envs", "4", "--no-progress", "--log-every", "0.1"]
ENDS = {
    "target": ["--target-score", "12", "--total-env-steps", "400000"],  # random play scores 20 or so
    "budget": ["--total-env-steps", "1000"],
}
KEPT = ("latest.pt", "previous.pt", "best.pt", "metrics.csv", "episodes.csv", "curve.png", "config.json")


def begin(algorithm, run_dir, *more):
    workers = [] if algorithm == "a2c" else ["--workers", "2"]
    return [*FLAGS, "--algorithm", algorithm, *workers, "--run-dir", str(run_dir), *more]


def contents(run_dir):
    return {name: (run_dir / name).read_bytes() for name in KEPT if (run_dir / name).exists()}


@pytest.mark.parametrize("algorithm", ["a2c", "a3c", "ga3c"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_a_finished_run_that_is_resumed_starts_no_worker_and_changes_no_byte(
    end, algorithm, tmp_path, capsys, monkeypatch
):
    run_dir = tmp_path / "run"
    assert cli.train(begin(algorithm, run_dir, *end)) == 0
    before = contents(run_dir)
    assert len(before) >= 6
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(trainer.ALGORITHMS[algorithm], "start", None)
        for _ in range(2):
            assert cli.train(["--resume", str(run_dir)]) == 0
            out = capsys.readouterr().out
            assert "finished already" in out and "resumed at" not in out
            assert contents(run_dir) == before
    state = load_checkpoint(run_dir / "latest.pt")
    more = ["--total-env-steps", "400000", "--target-score", "500", "--stop-after", str(state["env_steps"] + 200)]
    assert cli.train(["--resume", str(run_dir), *more]) == 0
    assert load_checkpoint(run_dir / "latest.pt")["env_steps"] >= state["env_steps"] + 200


def test_a_target_that_was_reached_stays_reached_whatever_games_end_meanwhile(tmp_path, capsys):
    run_dir = tmp_path / "run"
    whole = Trainer(parse_config(begin("a2c", run_dir, "--target-score", "12")))
    whole.algorithm.drain = lambda: TrainingStats(
        0, [Episode(0, 0.0, 1)] * 100, {}
    )  # what workers finish while they leave
    assert whole.run() == 0 and whole.scores.mean < 12
    assert "CartPole-v1: reached a mean score of" in capsys.readouterr().out
    assert cli.train(["--resume", str(run_dir)]) == 0
    assert "finished already" in capsys.readouterr().out
    again = Trainer(parse_config(["--resume", str(run_dir), "--target-score", "100"]))
    assert not again._outcome()
    again.close()


def test_a_checkpoint_of_a_finished_run_is_written_after_the_last_rows(tmp_path, monkeypatch):
    saved = []
    whole = Trainer(parse_config(begin("a2c", tmp_path / "run", "--total-env-steps", "640", "--checkpoint-every", "1")))
    save = whole._save
    whole.algorithm.drain = lambda: saved.append("settled") or TrainingStats(0, [], {})
    whole._save = lambda state: saved.append(state["env_steps"]) or save(state)
    assert whole.run() == 0
    assert saved == [0, 128, 256, 384, 512, "settled", 640]

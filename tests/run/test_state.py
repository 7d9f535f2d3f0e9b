"""The state of a run in memory and on disk."""

import pytest
import torch
from runs import opened, tiny
from toys import same

from a2c.run import state as run_state
from a2c.run.checkpoint import REQUIRED, CheckpointError, load_checkpoint
from a2c.run.trainer import Trainer


@pytest.fixture
def trainer(tmp_path):
    """A trainer whose environments are started and whose files are open."""
    trainer = opened(tiny(tmp_path / "run", checkpoint_every=160, num_minibatches=1))
    yield trainer
    trainer.close()


def test_run_state_snapshot_is_a_copy_and_restore_goes_back_to_it(trainer):
    state = trainer.state
    snapshot = state.snapshot()
    assert snapshot is state.in_memory and snapshot["env_steps"] == 0
    before = [parameter.clone() for parameter in trainer.learner.net.parameters()]
    trainer.algorithm.training_step()
    trainer.scores.add([1.0])
    assert snapshot["env_steps"] == 0 and snapshot["scores"]["episodes"] == 0 and state.env_steps == 80
    assert not all(map(torch.equal, before, trainer.learner.net.parameters()))
    state.restore()
    assert all(map(torch.equal, before, trainer.learner.net.parameters()))
    assert state.env_steps == trainer.learner.updates == trainer.scores.episodes == 0


def test_run_state_restart_replays_the_same_bits(trainer):
    trainer.algorithm.training_step()
    trainer.state.snapshot()
    stats = trainer.algorithm.training_step()
    first = trainer.state.snapshot()
    trainer.state.save(trainer.outputs)
    trainer.algorithm.close(failed=True)
    trainer.state.restore()
    assert trainer.state.restart()  # its episodes continue
    assert trainer.state.env_steps == 160 and stats.env_steps == 80
    again = trainer.state.snapshot()
    for part in ("network", "optimizer", "algorithm", "scores", "metrics"):
        assert same(first[part], again[part]), part


def test_run_state_saves_a_checkpoint_when_due_and_else_takes_a_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(run_state, "SNAPSHOT_EVERY", 1)
    trainer = opened(tiny(tmp_path / "run", checkpoint_every=160))
    steps = []
    for _ in range(4):
        trainer.state.save_when_due(trainer.outputs)
        saved = load_checkpoint(tmp_path / "run" / "latest.pt")
        steps.append((saved["env_steps"], trainer.state.in_memory["env_steps"]))
        trainer.algorithm.training_step()
    assert steps == [(0, 0), (0, 80), (160, 160), (160, 240)]
    trainer.state.save_last(trainer.outputs)
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] == trainer.state.saved_at == 320
    assert set(load_checkpoint(tmp_path / "run" / "latest.pt")) == {*REQUIRED, "rewards"}  # not in older ones
    trainer.close()


@pytest.mark.parametrize(("rollout_steps", "decisions"), [(5, 500), (20, 500), (128, 25 * 128)])
def test_run_state_is_at_most_25_rollouts_or_500_decisions_of_each_environment_old(rollout_steps, decisions, tmp_path):
    trainer = Trainer(tiny(tmp_path / "run", rollout_steps=rollout_steps))
    trainer.close()
    assert trainer.state.distance == 4 * decisions


def test_run_state_saves_the_best_policy_once_100_episodes_are_finished(trainer, tmp_path):
    best = tmp_path / "run" / "best.pt"
    for scores, saved in (([5.0] * 99, None), ([5.0], 5.0), ([4.0], 5.0), ([50.0], 5.44)):
        trainer.scores.add(scores)
        trainer.state.snapshot()
        assert trainer.state.save(trainer.outputs)
        assert (load_checkpoint(best)["saved_best"] if best.exists() else None) == saved
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["saved_best"] == 5.44


def test_run_state_load_restores_the_score_of_the_best_policy(trainer, tmp_path):
    trainer.scores.add([300.0] * 100)
    trainer.state.snapshot()
    assert trainer.state.save(trainer.outputs)
    trainer.close()
    resumed = opened(tiny(None, resume=tmp_path / "run", num_minibatches=1))
    resumed.scores.add([50.0] * 100)
    resumed.state.snapshot()
    assert resumed.state.saved_best == 300.0 and resumed.state.save(resumed.outputs)
    resumed.close()
    assert load_checkpoint(tmp_path / "run" / "best.pt")["scores"]["last"] == [300.0] * 100


def test_run_state_load_refuses_damaged_content_in_one_line(trainer, tmp_path):
    trainer.state.save(trainer.outputs)
    checkpoint = load_checkpoint(tmp_path / "run" / "latest.pt")
    for name, bad in (("scores", {}), ("seconds", "long"), ("optimizer", None)):
        with pytest.raises(CheckpointError, match="holds a damaged state") as refusal:
            trainer.state.load(tmp_path / "run" / "latest.pt", {**checkpoint, name: bad})
        assert "\n" not in str(refusal.value)


def test_run_state_of_a_resumed_run_keeps_its_wall_time(tmp_path):
    assert Trainer(tiny(tmp_path / "run", stop_after=160)).run().exit_code == 0
    before = load_checkpoint(tmp_path / "run" / "latest.pt")["seconds"]
    resumed = Trainer(tiny(None, resume=tmp_path / "run"))
    resumed.start()
    assert before <= resumed.state.in_memory["seconds"] < before + 5.0
    assert resumed.state.saved_at == resumed.state.env_steps == 160
    resumed.close()


def test_run_state_does_not_restore_the_episodes_of_another_number_of_environments(tmp_path, monkeypatch, capsys):
    assert Trainer(tiny(tmp_path / "run", total_env_steps=160)).run().exit_code == 0
    monkeypatch.setattr(run_state, "restores_exactly", None)  # not called: with ranks, some might restore theirs
    assert Trainer.resume(tmp_path / "run", num_envs=3, total_env_steps=320).run().exit_code == 0
    assert "every environment starts a new episode" in capsys.readouterr().out


def save(trainer, refused=()):
    """Save a checkpoint of now, in a directory that refuses the files in `refused`; the names of those written."""
    written, save = [], trainer.outputs.save
    trainer.outputs.save = lambda name, state: name not in refused and (written.append(name) or save(name, state))
    trainer.state.snapshot()
    assert trainer.state.save(trainer.outputs)
    trainer.outputs.save = save
    return written


def test_run_state_writes_the_best_policy_once_it_is_better_and_not_again(trainer):
    trainer.scores.add([5.0] * 100)
    assert save(trainer) == ["best.pt", "latest.pt"]
    assert save(trainer) == ["latest.pt"]


def test_run_state_saves_a_best_policy_that_the_disk_has_refused_with_the_next_checkpoint(trainer, tmp_path):
    trainer.scores.add([5.0] * 100)
    assert save(trainer, refused=["best.pt"]) == ["latest.pt"]
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["saved_best"] == -float("inf")
    assert save(trainer) == ["best.pt", "latest.pt"]
    assert load_checkpoint(tmp_path / "run" / "best.pt")["saved_best"] == 5.0


def test_a_resumed_run_replaces_a_best_policy_that_is_worse_than_a_mean_between_checkpoints(tmp_path):
    run = opened(tiny(tmp_path / "run", num_minibatches=1))
    run.scores.add([300.0] * 100 + [0.0] * 100)  # no checkpoint was due at 300
    run.scores.add([100.0] * 100)
    assert save(run) == ["best.pt", "latest.pt"]
    run.close()
    resumed = opened(tiny(None, resume=tmp_path / "run", num_minibatches=1))
    resumed.scores.add([200.0] * 100)
    assert save(resumed) == ["best.pt", "latest.pt"]
    resumed.close()
    assert load_checkpoint(tmp_path / "run" / "best.pt")["saved_best"] == 200.0

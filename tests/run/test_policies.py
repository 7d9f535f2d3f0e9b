"""Policy files that a run keeps: when they are written and removed, and what they hold."""

import json
import shutil

import pytest
import torch
from disks import Disk
from runs import after_rollout, opened, tiny
from toys import same

from a2c.config.config import Config
from a2c.run import outputs
from a2c.run.checkpoint import FORMAT, POLICY, CheckpointError, load_checkpoint
from a2c.run.policies import drop_policies, kept_policies, save_policy
from a2c.run.trainer import Trainer


def kept(run_dir):
    """The contents of the policy files, by their env_steps."""
    return {steps: path.read_bytes() for steps, path in kept_policies(run_dir).items()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of 480 decisions, 80 per rollout, that keeps a policy every 150."""
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    assert Trainer(tiny(run_dir, keep_policy_every=150)).run().exit_code == 0
    return run_dir


def test_a_policy_is_kept_at_the_first_step_at_or_after_each_multiple(straight):
    assert sorted(path.name for path in (straight / "policies").iterdir()) == [
        "000000160.pt",
        "000000320.pt",
        "000000480.pt",
    ]
    assert list(kept(straight)) == [160, 320, 480]
    for steps, path in kept_policies(straight).items():
        state = load_checkpoint(path)
        assert set(state) == set(POLICY) and state["env_steps"] == steps
    assert same(state["network"], load_checkpoint(straight / "latest.pt")["network"])


def test_keeping_policies_changes_nothing_else(straight, tmp_path):
    assert Trainer(tiny(tmp_path / "run")).run().exit_code == 0
    assert not (tmp_path / "run" / "policies").exists()
    with_files, without = (load_checkpoint(path / "latest.pt") for path in (straight, tmp_path / "run"))
    for part in ("network", "optimizer", "algorithm", "scores", "metrics"):
        assert same(with_files[part], without[part]), part


@pytest.mark.parametrize("stop_after", [80, 240, 320])
def test_a_resumed_run_keeps_the_same_files(straight, stop_after, tmp_path):
    run_dir = tmp_path / "run"
    assert Trainer(tiny(run_dir, keep_policy_every=150, stop_after=stop_after)).run().exit_code == 0
    assert list(kept(run_dir)) == [steps for steps in (160, 320) if steps <= stop_after]
    assert Trainer(tiny(None, resume=run_dir, keep_policy_every=150)).run().exit_code == 0
    assert kept(run_dir) == kept(straight)


def test_a_policy_holds_the_resolved_config_without_the_settings_of_a_session(straight):
    state = load_checkpoint(straight / "policies" / "000000160.pt")
    assert str(straight) not in state["config"]
    config = Config.from_json(state["config"])
    assert (config.run_dir, config.resume, config.network, config.keep_policy_every) == (None, None, "mlp", 150)


def test_files_of_later_decisions_are_removed_when_a_run_goes_back(straight, tmp_path):
    run_dir = tmp_path / "run"
    assert Trainer(tiny(run_dir, keep_policy_every=150, stop_after=240)).run().exit_code == 0
    for steps in (320, 480):  # of a process that was killed after it had written latest.pt
        shutil.copy(straight / "policies" / f"{steps:09}.pt", run_dir / "policies")
    (run_dir / "policies" / "000000480.pt.tmp").write_bytes(b"half")
    (run_dir / "policies" / "mine.pt").write_bytes(b"not ours")
    assert Trainer(tiny(None, resume=run_dir, keep_policy_every=0)).run().exit_code == 0
    assert sorted(path.name for path in (run_dir / "policies").iterdir()) == ["000000160.pt", "mine.pt"]


def test_a_recovery_replaces_the_files_after_the_state_in_memory(straight, tmp_path):
    trainer = opened(tiny(tmp_path / "run", keep_policy_every=150))
    steps, state = trainer.algorithm.training_step, trainer.state
    for rollouts in range(5):
        if rollouts == 3:
            state.snapshot()  # 240 decisions
        state.save_when_due(trainer.outputs)
        steps()
    state.save_when_due(trainer.outputs)
    assert list(kept(tmp_path / "run")) == [160, 320] and state.env_steps == 400
    trainer.algorithm.close(failed=True)
    state.restore()
    trainer.outputs.rewind(state.env_steps)
    assert list(kept(tmp_path / "run")) == [160]
    assert state.restart()
    while state.env_steps < 480:
        steps()
        state.save_when_due(trainer.outputs)
    assert kept(tmp_path / "run") == kept(straight)
    trainer.close()


def test_a_policy_that_the_disk_refuses_is_kept_later_and_the_run_says_so_once(tmp_path, monkeypatch, capsys):
    disk = Disk(tmp_path)
    monkeypatch.setattr("builtins.open", disk.open)
    monkeypatch.setattr(outputs, "DISK_RETRY", 0.0)
    trainer = Trainer(tiny(tmp_path / "run", keep_policy_every=150))

    def fill(rollouts):
        disk.full = 2 <= rollouts < 5

    after_rollout(trainer, fill)
    assert trainer.run().exit_code == 0
    assert list(kept(tmp_path / "run")) == [400, 480]  # 400: the one that was due at 160, and at 320
    assert capsys.readouterr().out.count("cannot write to") == 1


def test_a_file_where_the_policies_belong_stops_no_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("a2c.run.state.DISK_PATIENCE", 0.2)
    trainer = Trainer(tiny(tmp_path / "run", keep_policy_every=150))
    after_rollout(trainer, lambda rollouts: rollouts == 1 and (tmp_path / "run" / "policies").write_text("mine"))
    with pytest.raises(OSError, match="the last policy file could not be written"):
        trainer.run()
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] == 480
    assert (tmp_path / "run" / "policies").read_text() == "mine"


@pytest.mark.parametrize("algorithm", ["a3c", "ga3c"])
def test_the_other_algorithms_keep_policies_too(algorithm, tmp_path):
    run_dir = tmp_path / "run"
    config = tiny(run_dir, algorithm=algorithm, workers=2, keep_policy_every=400, total_env_steps=2000)
    assert Trainer(config).run().exit_code == 0
    steps = list(kept(run_dir))
    assert [at // 400 for at in steps] == sorted({at // 400 for at in steps}) and steps[-1] >= 2000
    last = load_checkpoint(kept_policies(run_dir)[steps[-1]])
    assert same(last["network"], load_checkpoint(run_dir / "latest.pt")["network"])


def test_a_policy_file_is_not_resumed(straight, tmp_path):
    run_dir = tmp_path / "published"
    run_dir.mkdir()
    shutil.copy(straight / "config.json", run_dir)
    shutil.copy(straight / "policies" / "000000480.pt", run_dir / "latest.pt")
    before = (run_dir / "latest.pt").read_bytes()
    with pytest.raises(CheckpointError, match="can be evaluated and recorded, not resumed") as refusal:
        Trainer(tiny(None, resume=run_dir))
    assert "\n" not in str(refusal.value) and str(run_dir / "latest.pt") in str(refusal.value)
    assert (run_dir / "latest.pt").read_bytes() == before


def test_save_policy_with_half_keeps_statistics_and_refuses_what_float16_cannot_hold(straight, tmp_path):
    state = load_checkpoint(straight / "latest.pt")
    state["network"] |= {"normalizer.mean": torch.rand(3, dtype=torch.float64), "count": torch.tensor(2**40)}
    save_policy(tmp_path / "half.pt", state, half=True)
    on_disk = torch.load(tmp_path / "half.pt", weights_only=True)["network"]
    loaded = load_checkpoint(tmp_path / "half.pt")["network"]
    for name, value in state["network"].items():
        assert loaded[name].dtype == value.dtype
        if value.dtype == torch.float32:
            assert on_disk[name].dtype == torch.float16
            torch.testing.assert_close(loaded[name], value, rtol=2**-11, atol=2**-25)
        else:
            assert torch.equal(loaded[name], value)
    next(iter(state["network"].values()))[0, 0] = 70_000.0
    with pytest.raises(ValueError, match=r"half must be off for this policy, got True: policy.0.weight is too large"):
        save_policy(tmp_path / "more.pt", state, half=True)


@pytest.mark.parametrize(
    ("name", "bad", "part"),
    [
        ("env_steps", -1, "bad env_steps"),
        ("network", None, "bad network"),
        ("format", FORMAT + 1, f"format {FORMAT + 1}"),
        ("version", ..., "has no version"),
        ("config", ..., "has no config"),
    ],
)
def test_a_policy_file_with_bad_content_is_refused_in_one_line(name, bad, part, straight, tmp_path):
    state = torch.load(straight / "policies" / "000000480.pt", weights_only=True)
    if bad is ...:
        del state[name]
    else:
        state[name] = bad
    torch.save(state, tmp_path / "policy.pt")
    with pytest.raises(CheckpointError, match=part) as refusal:
        load_checkpoint(tmp_path / "policy.pt")
    assert "\n" not in str(refusal.value)


def test_a_run_without_policies_has_none(tmp_path):
    assert kept_policies(tmp_path) == {}
    drop_policies(tmp_path, 0)


def test_the_config_of_a_policy_is_json_as_in_a_checkpoint(straight):
    texts = [load_checkpoint(straight / name)["config"] for name in ("latest.pt", "policies/000000480.pt")]
    assert json.loads(texts[0]) == json.loads(texts[1]) | {"run_dir": str(straight)}


def test_a_policy_whose_parameters_are_nan_is_not_kept(tmp_path):
    run = opened(tiny(tmp_path / "run", keep_policy_every=80))
    run.algorithm.training_step()
    with torch.no_grad():
        next(run.learner.net.parameters())[0] = float("nan")
    with pytest.raises(FloatingPointError, match="parameters are NaN or infinite"):
        run.state.keep_policy(run.outputs)
    run.close()
    assert not kept_policies(tmp_path / "run")

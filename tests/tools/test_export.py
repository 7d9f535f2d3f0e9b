"""A policy file plays as its checkpoint does, and cannot be resumed."""

import shutil

import numpy as np
import pytest
import torch
from runs import tiny
from toys import same

from a2c.cli import commands as cli
from a2c.config.extras import has_extra
from a2c.run.checkpoint import POLICY, load_checkpoint
from a2c.run.trainer import Trainer
from a2c.tools import export as exporting
from a2c.tools.evaluate import evaluate
from a2c.tools.export import export
from a2c.tools.load import load_policy
from a2c.tools.record_video import record_video

SMALL = ["--backend", "sync", "--num-envs", "2", "--rollout-steps", "5", "--total-env-steps", "40", "--no-progress"]


@pytest.fixture(scope="module", params=["pong-fast", "lstm"])
def run(request, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp(request.param) / "run"
    flags = ["--preset", request.param, *SMALL, "--max-episode-frames", "240", "--learning-rate", "0.01"]
    assert cli.train([*flags, "--keep-policy-every", "20", "--run-dir", str(run_dir)]) == 0
    return run_dir


@pytest.fixture
def published(run, tmp_path):
    """A directory as it is published: a policy file."""
    folder = tmp_path / "published"
    folder.mkdir()
    assert export(run, folder / "latest.pt").env_steps == 40
    return folder


def refused(args, capsys):
    code = cli.main([str(arg) for arg in args])
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


def logits_of(run_dir, checkpoint="latest.pt"):
    policy = load_policy(run_dir, checkpoint)
    obs = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (64, *policy.spaces.obs_shape), np.uint8))
    with torch.no_grad():
        return policy.net(obs)[0]


def test_an_exported_policy_plays_as_its_checkpoint_does_bit_for_bit(run, published, tmp_path):
    assert set(load_checkpoint(published / "latest.pt")) == set(POLICY)
    assert same(load_checkpoint(published / "latest.pt")["network"], load_checkpoint(run / "latest.pt")["network"])
    assert torch.equal(logits_of(published), logits_of(run))
    assert np.array_equal(evaluate(published, 3, seed=5), evaluate(run, 3, seed=5))
    pictures = [tmp_path / "policy.gif", tmp_path / "checkpoint.gif"]
    exported, recorded = record_video(published, pictures[0])[0], record_video(run, pictures[1])[0]
    assert exported == recorded._replace(checkpoint=published / "latest.pt")
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    before = {path.name for path in published.iterdir()}
    assert cli.main(["record", str(published)]) == 0
    assert {path.name for path in published.iterdir()} - before == {"episode.webp"}


def test_float16_moves_the_logits_by_less_than_a_hundredth(run, tmp_path):
    export(run, tmp_path / "half.pt", half=True)
    exact, half = logits_of(run), logits_of(run, str(tmp_path / "half.pt"))
    assert half.dtype == torch.float32 and not torch.equal(exact, half)
    torch.testing.assert_close(half, exact, rtol=0, atol=0.01)
    assert evaluate(run, 1, checkpoint=str(tmp_path / "half.pt")).shape == (1,)


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
def test_a_policy_file_of_the_small_network_is_small(run, tmp_path):
    sizes = []
    for half in (False, True):
        export(run, tmp_path / f"{half}.pt", half=half)
        sizes.append((tmp_path / f"{half}.pt").stat().st_size)
    assert sizes[0] < 3_000_000 and sizes[1] < 1_500_000


def test_export_command_writes_the_policy_of_any_checkpoint(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(run), "mine.pt", "--checkpoint", "policies/000000020.pt"]) == 0
    kept = run / "policies" / "000000020.pt"
    assert capsys.readouterr().out.startswith(f"mine.pt: policy of {kept} after 20 env_steps, ")
    assert (tmp_path / "mine.pt").read_bytes() == kept.read_bytes()
    for path in ("./mine.pt", str(kept)):  # a file elsewhere
        assert torch.equal(logits_of(run, path), logits_of(run, "policies/000000020.pt"))
    assert "run/mine.pt" in refused(["evaluate", run, "--checkpoint", "mine.pt"], capsys)


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
def test_a_policy_file_is_not_resumed_and_stays(run, published, capsys):
    shutil.copy(run / "config.json", published)
    before = (published / "latest.pt").read_bytes()
    error = refused(["train", "--resume", published], capsys)
    assert str(published / "latest.pt") in error and "can be evaluated and recorded, not resumed" in error
    assert (published / "latest.pt").read_bytes() == before


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
@pytest.mark.parametrize("keep", [0, 100, 0.5, -1])
@pytest.mark.parametrize("command", ["evaluate", "record"])
def test_a_truncated_policy_file_is_refused_in_one_line(command, keep, published, capsys):
    content = (published / "latest.pt").read_bytes()
    (published / "latest.pt").write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    assert "damaged or not a checkpoint" in refused([command, published], capsys)


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["policy.pth"], ["out must end in .pt or .onnx", "policy.pth"]),
        (["policy"], ["out must end in .pt"]),
        (["policy.onnx", "--half"], ["half must be off where out ends in .onnx"]),
        (["no/such/policy.pt"], ["out must lie in a directory that exists"]),
        (["taken.pt"], ["out must be a new file", "taken.pt"]),
        (["policy.pt", "--checkpoint", "none.pt"], ["checkpoint must be a file", "none.pt"]),
        (["policy.pt", "--halve"], ["Unrecognized options: --halve", "did you mean --half?"]),
        ([], ["PATH"]),
    ],
)
def test_export_command_refuses_in_one_line_and_writes_nothing(args, parts, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.pt").write_bytes(b"mine")
    error = refused(["export", run, *args], capsys)
    assert all(part in error for part in parts), error
    assert [path.name for path in tmp_path.iterdir()] == ["taken.pt"]
    assert (tmp_path / "taken.pt").read_bytes() == b"mine"


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
def test_export_command_refuses_parameters_that_float16_cannot_hold(run, tmp_path, capsys):
    state = torch.load(run / "latest.pt", weights_only=True)
    state["network"]["policy.weight"][0, 0] = 1e6
    torch.save(state, tmp_path / "large.pt")
    out = tmp_path / "half.pt"
    error = refused(["export", run, out, "--checkpoint", tmp_path / "large.pt", "--half"], capsys)
    assert "half must be off for this policy" in error and not out.exists()


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
def test_export_raises_on_a_disk_that_refuses(run, tmp_path, capsys, monkeypatch):
    def full(path, state, half):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "save_policy", full)
    assert cli.main(["export", str(run), str(tmp_path / "policy.pt")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'policy.pt'} could not be written: ") and error.count("\n") == 1


class Own(torch.nn.Module):
    def __init__(self, input_shape, n_actions):
        super().__init__()
        self.both = torch.nn.Linear(*input_shape, n_actions + 1)

    def forward(self, obs):
        both = self.both(obs)
        return both[:, 1:], both[:, :1]


def test_a_network_of_ones_own_is_exported(tmp_path):
    Trainer(tiny(tmp_path / "run", stop_after=80), network=Own).run()
    with pytest.raises(ValueError, match="as the argument network"):
        export(tmp_path / "run", tmp_path / "policy.pt")
    assert export(tmp_path / "run", tmp_path / "policy.pt", network=Own).env_steps == 80
    assert evaluate(tmp_path / "policy.pt", 1, network=Own).shape == (1,)
    if has_extra("onnx"):
        assert export(tmp_path / "run", tmp_path / "policy.onnx", network=Own).env_steps == 80

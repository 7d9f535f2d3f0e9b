"""An ONNX model computes what the network computes, from raw observations, and plays without torch."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from runs import TINY

from a2c import __version__
from a2c.cli import commands as cli
from a2c.config.config import Config
from a2c.config.extras import PACKAGES, has_extra
from a2c.config.resolve import resolve
from a2c.envs.single import probe_spaces
from a2c.networks import make_network
from a2c.tools import onnx_model as module
from a2c.tools.onnx_model import onnx_model

needs_onnx = pytest.mark.skipif(not has_extra("onnx"), reason=f"needs {', '.join(PACKAGES['onnx'])}")
GUIDE = Path(__file__).parents[2] / "docs" / "export.md"
ATARI = {"env": "pong", "frame_size": 42}
CASES = [
    *({**ATARI, "network": network, "normalize_obs": norm} for network in ("small", "lstm") for norm in (True, False)),
    *({**ATARI, "network": network} for network in ("atari", "nature", "nips")),
    {"env": "CartPole-v1", "network": "mlp"},
    {"env": "CartPole-v1", "network": "lstm"},
    {"env": "FrozenLake-v1", "network": "mlp"},
]


def made(settings, frames=8):
    """Config, network and checkpoint of a policy that has seen some frames and has learned nothing."""
    config = Config(**settings)
    spaces = probe_spaces(config)
    config = resolve(config, spaces.obs_shape)
    torch.manual_seed(1)
    net = make_network(config, spaces.obs_shape, spaces.n_actions, spaces.stacked).eval()
    if net.normalizer is not None:
        net.normalizer.update(torch.randint(0, 256, (frames, *spaces.obs_shape[1:]), dtype=torch.uint8))
    return config, net, {"env_steps": 7, "config": config.to_json()}


def observations(config, number):
    spaces = probe_spaces(config)
    rng = np.random.default_rng(number)
    if spaces.obs_dtype == np.uint8:
        return rng.integers(0, 256, (number, *spaces.obs_shape), np.uint8)
    return rng.normal(size=(number, *spaces.obs_shape)).astype(spaces.obs_dtype)


def session_of(content):
    from onnxruntime import InferenceSession

    return InferenceSession(content, providers=["CPUExecutionProvider"])


@needs_onnx
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("settings", CASES, ids=lambda one: "-".join(map(str, one.values())))
def test_model_returns_what_the_network_returns_for_raw_observations(settings):
    config, net, state = made(settings)
    recurrent = config.network == "lstm"
    before = copy.deepcopy(net)
    session = session_of(onnx_model(config, net, state))
    assert [i.name for i in session.get_inputs()] == ["obs", "rnn_state"][: 1 + recurrent]
    assert [o.name for o in session.get_outputs()] == ["logits", "values", "next_rnn_state"][: 2 + recurrent]
    assert all(one.shape[0] == "batch" for one in (*session.get_inputs(), *session.get_outputs()))
    for number in (1, 5):
        obs = observations(config, number)
        rnn_state = torch.rand(number, getattr(net, "rnn_state_size", 0))
        inputs = {"obs": obs} | ({"rnn_state": rnn_state.numpy()} if recurrent else {})
        with torch.no_grad():
            expected = before.step(torch.from_numpy(obs), rnn_state) if recurrent else before(torch.from_numpy(obs))
        for found, wanted in zip(session.run(None, inputs), expected, strict=True):
            np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-5)


@needs_onnx
def test_model_is_checked_with_the_dtype_of_the_space_where_the_environment_returns_another():
    gym.register("Doubles-v0", entry_point="toys:DoublesEnv")
    inputs = session_of(onnx_model(*made({"env": "Doubles-v0", "network": "mlp"}))).get_inputs()
    assert [i.type for i in inputs] == ["tensor(float)"]


@needs_onnx
def test_model_has_metadata_and_no_paths_of_this_machine():
    config, net, state = made({**ATARI, "network": "small", "run_dir": "/somewhere/private"})
    content = onnx_model(config, net, state)
    facts = session_of(content).get_modelmeta().custom_metadata_map
    assert set(facts) == {"a2c", "env", "actions", "env_steps", "config"}
    assert (facts["a2c"], facts["env"], facts["env_steps"]) == (__version__, "pong", "7")
    assert json.loads(facts["actions"]) == ["NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE"]
    assert Config.from_json(facts["config"]) == Config(**vars(config) | {"run_dir": None})
    assert b"private" not in content and str(Path(module.__file__).parents[2]).encode() not in content


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("cartpole") / "run"
    assert cli.train([*TINY, "--total-env-steps", "80", "--no-progress", "--run-dir", str(run_dir)]) == 0
    return run_dir


@needs_onnx
def test_export_command_refuses_a_model_that_differs_and_leaves_no_file(cartpole, tmp_path, capsys, monkeypatch):
    converted = module._converted

    def wrong(policy, arguments, facts):
        with torch.no_grad():
            policy.net.value[4].bias += 0.01
            content = converted(policy, arguments, facts)
            policy.net.value[4].bias -= 0.01
        return content

    monkeypatch.setattr(module, "_converted", wrong)
    assert cli.main(["export", str(cartpole), str(tmp_path / "policy.onnx")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: values of onnxruntime must match torch's within 0.0001") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@needs_onnx
@pytest.mark.parametrize("network", ["mlp", "lstm"])
def test_the_block_of_the_guide_plays_without_torch(network, cartpole, tmp_path, capsys):
    run_dir = cartpole
    if network == "lstm":
        run_dir = tmp_path / "run"
        args = [*TINY, "--network", "lstm", "--total-env-steps", "80", "--no-progress", "--run-dir", str(run_dir)]
        assert cli.train(args) == 0
    capsys.readouterr()
    assert cli.main(["export", str(run_dir), str(tmp_path / "policy.onnx")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{tmp_path / 'policy.onnx'}: policy of {run_dir / 'latest.pt'} after 80 env_steps, ")
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.S)
    code = f"import sys; sys.modules['torch'] = None\n{block}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"score \d+\n", done.stdout)


def test_export_command_says_which_packages_are_missing(cartpole, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(PACKAGES, "onnx", ("onnx", "no_such_package"))
    assert cli.main(["export", str(cartpole), str(tmp_path / "policy.onnx")]) == 2
    error = capsys.readouterr().err
    assert 'pip install "a2c[onnx]"' in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

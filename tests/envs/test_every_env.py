"""Every discrete environment that gymnasium ships trains, and every other is refused in one line."""

import gymnasium as gym
import pytest

from a2c.cli import commands as cli
from a2c.config.config import Config
from a2c.envs.single import find_spec, is_atari, make_env
from a2c.run.checkpoint import load_checkpoint

IDS = [name for name, spec in gym.registry.items() if not is_atari(spec)]
PLAYED = {  # with the documented installation; the others need jax, Box2D or MuJoCo, or are continuous
    *(
        "CartPole-v0",
        "CartPole-v1",
        "MountainCar-v0",
        "Acrobot-v1",
        "Blackjack-v1",
        "FrozenLake-v1",
        "FrozenLake8x8-v1",
    ),
    *("CliffWalking-v1", "CliffWalkingSlippery-v1", "Taxi-v4"),
}


def test_make_env_makes_every_id_of_gymnasium_or_refuses_it_in_one_line():
    made = set()
    for name in IDS:
        try:
            make_env(Config(env=name, backend="sync"), find_spec(name), 0).close()
        except ValueError as error:
            assert str(error).startswith("env must ") and name in str(error)
        else:
            made.add(name)
    assert made >= PLAYED and len(IDS) > 50


OFTEN = ("Blackjack-v1", "FrozenLake-v1")  # observations of several numbers, and of one; the others are slow


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in IDS])
def test_train_runs_and_resumes_on_every_discrete_environment(name, tmp_path, capsys):
    try:
        make_env(Config(env=name, backend="sync"), find_spec(name), 0).close()
    except ValueError as error:
        pytest.skip(str(error))
    flags = ["--env", name, "--backend", "sync", "--num-envs", "2", "--rollout-steps", "20", "--threads", "1"]
    assert cli.train([*flags, "--no-progress", "--stop-after", "40", "--run-dir", str(tmp_path / "run")]) == 0
    assert cli.train(["--resume", str(tmp_path / "run"), "--stop-after", "80"]) == 0
    assert load_checkpoint(tmp_path / "run" / "latest.pt")["env_steps"] == 80
    assert "its episodes continue" in capsys.readouterr().out


def test_train_refuses_an_id_whose_import_fails_in_one_line(tmp_path, capsys):
    assert cli.train(["--env", "Ant-v2", "--backend", "sync", "--run-dir", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: env must be an id that can be made here, got 'Ant-v2'") and err.count("\n") == 1

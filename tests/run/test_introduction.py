"""The lines that a run prints before it starts."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from a2c.config.config import Config
from a2c.run import introduction
from a2c.run.trainer import Trainer


def shown(config):
    trainer = Trainer(config)
    trainer.close()
    return {line[:15].strip(): line[15:] for line in trainer.introduction()}


def test_introduction_of_an_atari_game_says_protocol_algorithm_network_device_and_length(tmp_path):
    config = Config.from_preset("pong-fast", threads=2, precision="float32", run_dir=tmp_path / "a run")
    lines = shown(config)
    assert str(tmp_path / "a run") in lines.pop("to watch")
    assert lines == {
        "run directory": f"{tmp_path / 'a run'}",
        "environment": "PongNoFrameskip-v4 (4x42x42, frame skip 4, sticky actions 0, up to 30 no-ops)",
        "algorithm": "a2c: 16 native environments x 128 steps, 12 minibatches, 3 epochs",
        "network": "small, 674,871 parameters",
        "device": "cpu, float32, 2 threads",
        "length": "1,000,000 decisions, or until the mean of 100 episodes is 18",
    }


def test_introduction_says_on_a_gpu_whether_there_are_cuda_graphs():
    for replays, text in ((True, "2 threads, CUDA graphs"), (False, "2 threads, no CUDA graphs")):
        compute = SimpleNamespace(
            device=torch.device("cuda:0"), threads=2, cuda_graphs=replays, ranks=SimpleNamespace(size=1)
        )
        assert introduction._computing(compute) == text
    compute = SimpleNamespace(device=torch.device("cpu"), threads=2, cuda_graphs=False, ranks=SimpleNamespace(size=4))
    assert introduction._computing(compute) == "2 threads on each of 4 ranks"


def test_introduction_names_what_a_game_has_beyond_the_defaults(tmp_path):
    changes = {"env": "ALE/Breakout-v5", "noop_max": 0, "num_minibatches": 1, "epochs": 1}
    config = Config.from_preset("atari", **changes, run_dir=tmp_path / "run")
    lines = shown(config)
    assert lines["environment"].endswith("frame skip 4, sticky actions 0.25, no no-ops, lost lives are terminal)")
    assert lines["algorithm"].endswith("x 64 steps, 1 minibatch, 1 epoch")
    assert lines["length"] == "10,000,000 decisions"


def test_introduction_of_another_environment_and_of_sliding_windows(tmp_path):
    config = Config(env="CartPole-v1", backend="sync", num_envs=1, threads=1, run_dir=tmp_path / "run")
    assert shown(config)["environment"] == "CartPole-v1 (observations 4, rewards clipped to 1)"
    assert shown(replace(config, reward_clip=0.0))["environment"] == "CartPole-v1 (observations 4)"
    assert shown(config)["algorithm"].startswith("a2c: 1 sync environment x 32 steps, ")
    book = Config.from_preset("book", env="CartPole-v1", backend="sync", run_dir=tmp_path / "run")
    assert shown(book)["algorithm"] == "a2c: 50 sync environments x 4 steps, windows in minibatches of 32"


def test_introduction_of_a3c_and_ga3c_counts_who_plays_and_says_where_environments_run(tmp_path):
    settings = {"env": "CartPole-v1", "num_envs": 8, "num_minibatches": 4, "run_dir": tmp_path / "run"}
    a3c = shown(Config(algorithm="a3c", workers=2, **settings))["algorithm"]
    assert a3c.startswith("a3c: 2 workers, 8 sync environments x 32 steps")
    ga3c = shown(Config(algorithm="ga3c", workers=1, **settings))["algorithm"]
    assert ga3c.startswith("ga3c: 1 actor, 8 sync environments x 32 steps")


def test_introduction_names_what_is_installed_to_watch_a_run(tmp_path, monkeypatch):
    config = Config.from_preset("cartpole", run_dir=tmp_path / "run")
    installed = {"report", "tensorboard"}
    monkeypatch.setattr(introduction, "has_extra", lambda name: name in installed)
    assert shown(config)["to watch"] == f"a2c watch {tmp_path / 'run'}"
    installed.remove("report")
    assert shown(config)["to watch"] == f"tensorboard --logdir {tmp_path / 'run'}"
    installed.remove("tensorboard")
    assert shown(config)["to watch"] == f"{tmp_path / 'run' / 'curve.png'}"

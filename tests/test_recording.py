"""A film shows the game that the policy played, whole, or nothing is written."""

import importlib.util

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from a2c import cli, recording
from a2c.atari import find_spec, make_env
from a2c.collector import sample
from a2c.evaluation import load_policy
from a2c.recording import record

SMALL = ["--backend", "sync", "--num-envs", "2", "--rollout-steps", "5", "--total-env-steps", "20", "--no-progress"]


@pytest.fixture(scope="module", params=["pong-fast", "lstm"])
def run(request, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp(request.param) / "run"
    flags = ["--preset", request.param, *SMALL, "--max-episode-frames", "240", "--run-dir", str(run_dir)]
    assert cli.train(flags) == 0
    return run_dir


@pytest.mark.parametrize("greedy", [True, False])
def test_the_pictures_are_those_of_the_game(run, greedy, tmp_path, monkeypatch):
    shown = []
    write = recording.WRITERS[".gif"]

    def keep(path, pictures, fps):
        shown.extend(pictures)
        write(path, shown, fps)

    monkeypatch.setitem(recording.WRITERS, ".gif", keep)
    score, length = record(run, tmp_path / "game.gif", greedy=greedy, seed=3)

    config, net, _ = load_policy(run)
    env = make_env(config, find_spec(config.env), 3, render_mode="rgb_array")
    draw, memory, first = torch.Generator().manual_seed(3), None, True
    obs, _ = env.reset(seed=3)
    seen, points, over = [env.ale.getScreenRGB()], 0.0, False
    while not over:
        with torch.no_grad():
            if hasattr(net, "memory_size"):
                memory = torch.zeros(1, net.memory_size) if first else memory
                logits, _, memory = net.step(torch.from_numpy(obs.copy())[None], memory)
            else:
                logits, _ = net(torch.from_numpy(obs.copy())[None])
        first = False
        action = logits.argmax(1) if greedy else sample(logits.float(), draw)[0]
        obs, reward, terminated, truncated, _ = env.step(int(action))
        over, points = terminated or truncated, points + reward
        seen.append(env.ale.getScreenRGB())
    env.close()
    assert length == 60 == len(seen) - 1 and score == points
    assert len(shown) == len(seen) and all(np.array_equal(a, b) for a, b in zip(shown, seen, strict=True))
    with Image.open(tmp_path / "game.gif") as film:
        assert film.size == (160, 210)
        assert film.info["duration"] % 70 == 0 and film.info["loop"] == 0  # 15 decisions a second


def test_an_mp4_holds_a_picture_per_decision(run, capsys):
    assert cli.main(["record", str(run)]) == 0
    assert "score" in (line := capsys.readouterr().out) and "60 decisions" in line
    film = cv2.VideoCapture(str(run / "game.mp4"))
    assert (film.get(cv2.CAP_PROP_FRAME_COUNT), film.get(cv2.CAP_PROP_FPS)) == (61, 15)
    ok, picture = film.read()
    assert ok and picture.shape == (630, 480, 3)
    red = picture[300, 240, ::-1]  # Pong's brown: red leads
    assert red[0] > red[1] > red[2]


def test_the_old_film_stays_where_the_new_one_fails(run, tmp_path, monkeypatch):
    out = tmp_path / "game.gif"
    out.write_bytes(b"old")

    def full(path, pictures, fps):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setitem(recording.WRITERS, ".gif", full)
    with pytest.raises(OSError, match="disk full"):
        record(run, out)
    assert [path.name for path in tmp_path.iterdir()] == ["game.gif"] and out.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--out", "game.avi"], ["out must end in .mp4 or .gif", "game.avi"]),
        (["--out", "no/such/game.gif"], ["out must lie in a directory that exists"]),
        (["--seed", "-1"], ["seed must be at least 0", "-1"]),
        (["--checkpoint", "none.pt"], ["checkpoint must be a file", "none.pt"]),
        (["--fast"], ["Unrecognized options: --fast"]),
    ],
)
def test_what_cannot_be_filmed_is_refused_in_one_line(flags, parts, run, capsys):
    assert cli.main(["record", str(run), *flags]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1 and all(part in line for part in parts), line


@pytest.mark.skipif(importlib.util.find_spec("pygame") is not None, reason="this machine can draw CartPole")
def test_an_environment_that_cannot_be_drawn_says_what_is_missing(tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert cli.train(["--preset", "cartpole", *SMALL, "--run-dir", str(run_dir)]) == 0
    capsys.readouterr()
    assert cli.main(["record", str(run_dir)]) == 2
    assert "pygame is not installed" in capsys.readouterr().err
    assert not list(run_dir.glob("*game*"))

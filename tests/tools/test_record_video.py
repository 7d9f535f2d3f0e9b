"""A video shows the episode that the policy played, whole, or nothing is written."""

import importlib.util
import resource
import subprocess
import sys
import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from PIL import Image

from a2c.cli import commands as cli
from a2c.compute.compute import Compute
from a2c.compute.replica import make_replica
from a2c.envs.make import run_seeds
from a2c.envs.single import find_spec, make_env
from a2c.tools import record_video as recording
from a2c.tools.load import load_policy
from a2c.tools.record_video import Video, record_video

SMALL = ["--backend", "sync", "--num-envs", "2", "--rollout-steps", "5", "--total-env-steps", "20", "--no-progress"]


@pytest.fixture(scope="module", params=["pong-fast", "lstm"])
def run(request, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp(request.param) / "run"
    flags = ["--preset", request.param, *SMALL, "--max-episode-frames", "240", "--run-dir", str(run_dir)]
    assert cli.train(flags) == 0
    return run_dir


@pytest.mark.parametrize("greedy", [True, False])
def test_record_video_shows_the_pictures_of_the_emulator(run, greedy, tmp_path, monkeypatch):
    shown = []
    write = recording.WRITERS[".gif"]

    def keep(path, pictures, fps):
        shown.extend(pictures)
        write(path, shown, fps)

    monkeypatch.setitem(recording.WRITERS, ".gif", keep)
    video = record_video(run, tmp_path / "episode.gif", greedy=greedy, seed=3)

    config, net, _ = load_policy(run)
    config = replace(config, seed=3, num_envs=1, threads=1)
    with closing(Compute(config)) as compute:
        net = make_replica(net, compute)  # in the precision in which it was trained
    env = make_env(config, find_spec(config.env), run_seeds(config).envs[0], render_mode="rgb_array")
    draw, rnn_state, first = torch.Generator().manual_seed(3), None, True
    obs, _ = env.reset(seed=run_seeds(config).envs[0])
    seen, points, over = [env.ale.getScreenRGB()], 0.0, False
    while not over:
        with torch.no_grad():
            if hasattr(net, "rnn_state_size"):
                rnn_state = torch.zeros(1, net.rnn_state_size) if first else rnn_state
                logits, _, rnn_state = net.step(torch.from_numpy(obs.copy())[None], rnn_state)
            else:
                logits, _ = net(torch.from_numpy(obs.copy())[None])
        first = False
        probabilities = logits.float().softmax(1)
        action = probabilities.argmax(1) if greedy else torch.multinomial(probabilities, 1, generator=draw)
        obs, reward, terminated, truncated, _ = env.step(int(action))
        over, points = terminated or truncated, points + reward
        seen.append(env.ale.getScreenRGB())
    env.close()
    assert video == Video(points, 60, True) and len(seen) == 61
    assert len(shown) == len(seen) and all(np.array_equal(a, b) for a, b in zip(shown, seen, strict=True))
    with Image.open(tmp_path / "episode.gif") as gif:
        assert gif.size == (160, 210)
        assert gif.info["duration"] % 70 == 0 and gif.info["loop"] == 0  # about 15 decisions a second


def test_record_command_writes_a_picture_per_decision(run, capsys):
    assert cli.main(["record", str(run)]) == 0
    assert "score" in (line := capsys.readouterr().out) and "60 decisions" in line
    video = cv2.VideoCapture(str(run / "episode.mp4"))
    assert (video.get(cv2.CAP_PROP_FRAME_COUNT), video.get(cv2.CAP_PROP_FPS)) == (61, 15)
    ok, picture = video.read()
    assert ok and picture.shape == (630, 480, 3)
    red = picture[300, 240, ::-1]  # Pong's brown: red leads
    assert red[0] > red[1] > red[2]


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
def test_record_video_writes_webp_with_exact_pictures_in_real_time(run, tmp_path, monkeypatch):
    shown = []
    write = recording.WRITERS[".webp"]

    def keep(path, pictures, fps):
        shown.extend(pictures)
        shown[10:10] = [shown[10]] * 5  # the screen stands still
        write(path, shown, fps)

    monkeypatch.setitem(recording.WRITERS, ".webp", keep)
    assert record_video(run, tmp_path / "episode.webp").length == 60
    at, end = 0, 0.0
    with Image.open(tmp_path / "episode.webp") as video:
        assert video.size == (320, 420) and video.n_frames <= 61 and video.info["loop"] == 0
        for number in range(video.n_frames):
            video.seek(number)
            picture = np.asarray(video.convert("RGB"))
            end += video.info["duration"]
            while at < round(end * 15 / 1000):
                assert np.array_equal(picture, shown[at].repeat(2, axis=0).repeat(2, axis=1)), at
                at += 1
    assert at == len(shown) == 66 and abs(end - 66 * 1000 / 15) <= 1  # ms
    assert (tmp_path / "episode.webp").stat().st_size < 66 * 500  # a megabyte for 2,000 decisions


@pytest.mark.parametrize("colours", [1, 256, 4000])
def test_webp_keeps_every_colour_and_copies_pictures_that_change_in_place(colours, tmp_path):
    generator, picture = np.random.default_rng(0), np.zeros((40, 100, 3), np.uint8)
    palette = generator.integers(0, 256, (colours, 3), np.uint8)
    shown = []

    def pictures():
        for _ in range(3):
            picture[:] = palette[generator.permutation(4000).reshape(40, 100) % colours]
            shown.append(picture.copy())
            yield picture

    recording.WRITERS[".webp"](tmp_path / "episode.webp", pictures(), 30)
    with Image.open(tmp_path / "episode.webp") as video:
        assert video.n_frames == (1 if colours == 1 else 3)
        for number in range(video.n_frames):
            video.seek(number)
            exact = shown[number].repeat(3, axis=0).repeat(3, axis=1)
            assert np.array_equal(np.asarray(video.convert("RGB")), exact)


def test_record_video_keeps_the_old_file_when_it_fails(run, tmp_path, monkeypatch):
    out = tmp_path / "episode.gif"
    out.write_bytes(b"old")

    def full(path, pictures, fps):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setitem(recording.WRITERS, ".gif", full)
    with pytest.raises(OSError, match="disk full"):
        record_video(run, out)
    assert [path.name for path in tmp_path.iterdir()] == ["episode.gif"] and out.read_bytes() == b"old"


@pytest.mark.slow
@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
@pytest.mark.parametrize("name", ["episode.mp4", "episode.gif", "episode.webp"])
def test_record_video_raises_on_a_full_disk(run, name, tmp_path):
    out = tmp_path / name
    out.write_bytes(b"old")

    def small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))

    command = [sys.executable, "-m", "a2c", "record", str(run), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=small_disk)
    assert done.returncode == 1 and f"error: {out} could not be written" in done.stderr
    assert out.read_bytes() == b"old" and [path.name for path in tmp_path.iterdir()] == [name]


class Plain(gym.Env):
    """Asks for actions 5 and 6; its constructor and its drawing are those of an environment that draws nothing."""

    observation_space = gym.spaces.Box(0.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        return np.zeros(2, np.float32), 0.1, self.steps == 7, False, {}


class Drawn(Plain):
    """The same with pictures of an odd size."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        return np.full((31, 501, 3), 10 * self.steps, np.uint8)


@pytest.mark.parametrize("env", [Plain, Drawn])
def test_record_command_records_other_environments_or_refuses_them(env, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(gym.registry, "Video-v0", gym.envs.registration.EnvSpec("Video-v0", entry_point=env))
    run_dir = tmp_path / "run"
    assert cli.train(["--env", "Video-v0", *SMALL, "--run-dir", str(run_dir)]) == 0
    capsys.readouterr()
    code = cli.main(["record", str(run_dir)])
    if env is Plain:
        assert code == 2
        line = capsys.readouterr().err
        assert line.startswith("error: env must") and line.count("\n") == 1
        return
    assert code == 0 and f"score {sum([0.1] * 7)}, 7 decisions" in capsys.readouterr().out
    video = cv2.VideoCapture(str(run_dir / "episode.mp4"))
    assert (video.get(cv2.CAP_PROP_FRAME_COUNT), video.get(cv2.CAP_PROP_FPS)) == (8, 10)
    assert video.read()[1].shape == (30, 500, 3)


def test_record_command_stops_an_episode_without_an_end_and_prints_that(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recording, "LONGEST", 4)
    assert cli.main(["record", str(run), "--out", str(tmp_path / "episode.gif")]) == 0
    assert "the beginning of an episode" in (line := capsys.readouterr().out) and "4 decisions" in line


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--out", "episode.avi"], ["out must end in .mp4 or .gif or .webp", "episode.avi"]),
        (["--out", "no/such/episode.gif"], ["out must lie in a directory that exists"]),
        (["--seed", "-1"], ["seed must be at least 0", "-1"]),
        (["--checkpoint", "none.pt"], ["checkpoint must be a file", "none.pt"]),
        (["--fast"], ["Unrecognized options: --fast"]),
    ],
)
def test_record_command_refuses_in_one_line(flags, parts, run, capsys):
    assert cli.main(["record", str(run), *flags]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1 and all(part in line for part in parts), line


@pytest.mark.skipif(importlib.util.find_spec("pygame") is None, reason="pygame-ce of the documented install is missing")
def test_record_command_records_cartpole(tmp_path, capfd):
    run_dir = tmp_path / "run"
    assert cli.train(["--preset", "cartpole", *SMALL, "--run-dir", str(run_dir)]) == 0
    capfd.readouterr()
    assert cli.main(["record", str(run_dir), "--out", str(tmp_path / "episode.gif")]) == 0
    assert (tmp_path / "episode.gif").stat().st_size > 1000 and capfd.readouterr().out.count("\n") == 1


def test_documented_install_has_what_renders_cartpole():
    root = Path(cli.__file__).parents[2]
    needs = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    gymnasium = next(need for need in needs if need.startswith("gymnasium["))
    assert "classic-control" in gymnasium and gymnasium.endswith("<1.5")
    assert "\npygame-ce==" in (root / "constraints.txt").read_text(encoding="utf-8")


def test_record_command_prints_what_an_environment_lacks_to_be_rendered(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    run_dir = tmp_path / "run"
    assert cli.train(["--preset", "cartpole", *SMALL, "--run-dir", str(run_dir)]) == 0
    capsys.readouterr()
    assert cli.main(["record", str(run_dir)]) == 2
    assert "pygame is not installed" in capsys.readouterr().err
    assert not list(run_dir.glob("*episode.*"))

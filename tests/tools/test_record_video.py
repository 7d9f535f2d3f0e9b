"""A video shows the episode that the policy played, whole, or nothing is written."""

import importlib.util
import os
import resource
import subprocess
import sys
import tempfile
import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from PIL import Image

from a2c import Config, Trainer
from a2c.cli import commands as cli
from a2c.cli.options import RecordVideo
from a2c.compute.compute import Compute
from a2c.compute.replica import make_replica
from a2c.envs.make import run_seeds
from a2c.envs.single import find_spec, make_env
from a2c.tools import record_video as recording
from a2c.tools import video_writers
from a2c.tools.load import load_policy
from a2c.tools.record_video import RecordedEpisode, record_video

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
    write = video_writers.WRITERS[".gif"]

    def keep(path, pictures, fps):
        shown.extend(pictures)
        write(path, shown, fps)

    monkeypatch.setitem(video_writers.WRITERS, ".gif", keep)
    video = record_video(run, tmp_path / "episode.gif", greedy=greedy, seed=3)

    policy = load_policy(run)
    config = replace(policy.config, seed=3, num_envs=1, threads=1)
    with closing(Compute(config)) as compute:
        net = make_replica(policy.net, compute)  # in the precision in which it was trained
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
    assert video == [RecordedEpisode(3, points, 60, True, run / "latest.pt", 20)] and len(seen) == 61
    assert len(shown) == len(seen) and all(np.array_equal(a, b) for a, b in zip(shown, seen, strict=True))
    with Image.open(tmp_path / "episode.gif") as gif:
        assert gif.size == (160, 210)
        assert gif.info["duration"] % 70 == 0 and gif.info["loop"] == 0  # about 15 decisions a second


def read_mp4(path):
    """Pictures `[T, H, W, 3]`, frames per second, codec and format of the pixels."""
    av = pytest.importorskip("av")
    with av.open(str(path)) as film:
        stream = film.streams.video[0]
        pictures = [frame.to_ndarray(format="rgb24") for frame in film.decode(stream)]
        return np.stack(pictures), stream.average_rate, (stream.codec_context.name, stream.pix_fmt)


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
def test_mp4_is_what_browsers_play_with_a_picture_per_decision(run, tmp_path, capsys):
    pytest.importorskip("av")
    out = tmp_path / "episode.mp4"
    assert cli.main(["record", str(run), "--out", str(out)]) == 0
    assert "score" in (line := capsys.readouterr().out) and "60 decisions" in line
    pictures, fps, codec = read_mp4(out)
    assert (pictures.shape, fps, codec) == ((61, 630, 480, 3), 15, ("h264", "yuv420p"))
    red = pictures[0, 300, 240].astype(int)  # Pong's brown: red leads
    assert red[0] > red[1] > red[2]
    assert (content := out.read_bytes()).find(b"moov") < content.find(b"mdat")  # it plays while it loads


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
def test_without_the_extra_mp4_is_refused_in_one_line_before_anything_is_played(run, capsys, monkeypatch):
    monkeypatch.setattr(video_writers, "has_extra", lambda name: False)
    assert cli.main(["record", str(run), "--out", "episode.mp4"]) == 2
    line = capsys.readouterr().err
    assert 'pip install "a2c[video]"' in line and "'episode.mp4'" in line and line.count("\n") == 1


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
def test_record_video_writes_webp_with_exact_pictures_in_real_time(run, tmp_path, monkeypatch):
    shown = []
    write = video_writers.WRITERS[".webp"]

    def keep(path, pictures, fps):
        shown.extend(pictures)
        shown[10:10] = [shown[10]] * 5  # the screen stands still
        write(path, shown, fps)

    monkeypatch.setitem(video_writers.WRITERS, ".webp", keep)
    assert record_video(run, tmp_path / "episode.webp")[0].length == 60
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

    video_writers.write_video(tmp_path / "episode.webp", pictures(), 30)
    with Image.open(tmp_path / "episode.webp") as video:
        assert video.n_frames == (1 if colours == 1 else 3)
        for number in range(video.n_frames):
            video.seek(number)
            exact = shown[number].repeat(3, axis=0).repeat(3, axis=1)
            assert np.array_equal(np.asarray(video.convert("RGB")), exact)


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
def test_record_video_keeps_the_old_file_when_it_fails(run, tmp_path, monkeypatch):
    out = tmp_path / "episode.gif"
    out.write_bytes(b"old")

    def full(path, pictures, fps):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setitem(video_writers.WRITERS, ".gif", full)
    with pytest.raises(OSError, match="disk full"):
        record_video(run, out)
    assert [path.name for path in tmp_path.iterdir()] == ["episode.gif"] and out.read_bytes() == b"old"


@pytest.mark.slow
@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
@pytest.mark.parametrize("name", ["episode.mp4", "episode.gif", "episode.webp"])
def test_record_video_raises_on_a_full_disk(run, name, tmp_path):
    if name.endswith("mp4"):
        pytest.importorskip("av")
    out = tmp_path / name
    out.write_bytes(b"old")

    def small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))

    command = [sys.executable, "-m", "a2c", "record", str(run), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=small_disk)
    assert done.returncode == 1 and f"error: {out} could not be written" in done.stderr
    assert f"{tempfile.gettempdir()}/" in done.stderr and "(TMPDIR): " in done.stderr
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
    assert code == 0 and "score 0.7, 7 decisions" in capsys.readouterr().out
    with Image.open(run_dir / "episode.webp") as film:
        assert film.size == (501, 31) and film.n_frames == 8
    if importlib.util.find_spec("av"):
        assert cli.main(["record", str(run_dir), "--out", str(tmp_path / "episode.mp4")]) == 0
        pictures, fps, _ = read_mp4(tmp_path / "episode.mp4")
        assert pictures.shape == (8, 30, 500, 3) and fps == 10


class Blank(Drawn):
    """Names the render mode and returns no picture."""

    def render(self):
        return None


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Plain, "env_fn must accept the argument render_mode to be rendered, got TypeError: "),
        (Blank, "env must return an array from render(), got NoneType of custom/Blank-v0"),
    ],
)
def test_record_video_says_what_an_own_environment_lacks(env, message, tmp_path):
    config = Config(backend="sync", num_envs=1, rollout_steps=7, total_env_steps=7, threads=1, progress=False)
    assert Trainer(replace(config, run_dir=tmp_path / "run"), env_fn=env).run().exit_code == 0
    with pytest.raises(ValueError) as refusal:
        recording.record_video(tmp_path / "run", tmp_path / "film.webp", env_fn=env)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
def test_record_command_stops_an_episode_at_its_longest_and_prints_that(run, tmp_path, capsys):
    assert RecordVideo.max_length == recording.LONGEST
    whole, cut = tmp_path / "whole.webp", tmp_path / "cut.webp"
    assert cli.main(["record", str(run), "--out", str(whole)]) == 0
    assert "one episode of" in (line := capsys.readouterr().out) and "60 decisions" in line
    assert cli.main(["record", str(run), "--out", str(cut), "--max-length", "4"]) == 0
    assert "the beginning of an episode" in (line := capsys.readouterr().out) and "4 decisions" in line
    assert np.array_equal(pictures_of(cut), pictures_of(whole)[:5])


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--out", "episode.avi"], ["out must end in .mp4 or .gif or .webp", "episode.avi"]),
        (["--out", "no/such/episode.gif"], ["out must lie in a directory that exists"]),
        (["--seed", "-1"], ["seed must be at least 0", "-1"]),
        (["--episodes", "0"], ["episodes must be at least 1, got 0"]),
        (["--best-of", "0"], ["best_of must be at least 1, got 0"]),
        (["--max-length", "0"], ["max_length must be at least 1, got 0"]),
        (["--best-of", "2", "--episodes", "3"], ["episodes must be 1 where best_of is set, got 3"]),
        (["--seed", "2000000000", "--best-of", "2"], ["seed must be at least 0", "2000000001"]),
        (["--checkpoint", "none.pt"], ["checkpoint must be a file", "none.pt"]),
        (["--fast"], ["Unrecognized options: --fast"]),
    ],
)
def test_record_command_refuses_in_one_line(flags, parts, run, capsys):
    assert cli.main(["record", str(run), *flags]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1 and all(part in line for part in parts), line


def test_record_video_refuses_a_part_of_an_episode(tmp_path):
    with pytest.raises(ValueError, match=r"episodes must be at least 1, an integer, got 2\.5"):
        record_video("runs/none", tmp_path / "episode.webp", episodes=2.5)


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


def pictures_of(path):
    with Image.open(path) as film:
        found = []
        for number in range(film.n_frames):
            film.seek(number)
            found += [np.asarray(film.convert("RGB"))] * round(film.info["duration"] * 15 / 1000)
        return np.stack(found)


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
def test_episodes_follow_each_other_and_each_is_the_one_that_its_seed_gives_alone(run, tmp_path, capsys):
    film, second = tmp_path / "film.gif", tmp_path / "second.gif"
    both = record_video(run, film, seed=5, episodes=2)
    assert [one.seed for one in both] == [5, 6] and record_video(run, second, seed=6) == both[1:]
    with Image.open(film) as whole, Image.open(second) as alone:
        lasts = []
        for image in (whole, alone):
            image.seek(image.n_frames - 1)
            lasts.append(np.asarray(image.convert("RGB")))
    assert np.array_equal(*lasts)
    assert cli.main(["record", str(run), "--out", str(film), "--episodes", "2"]) == 0
    assert "2 episodes of" in (line := capsys.readouterr().out) and "120 decisions" in line


@pytest.mark.parametrize("run", ["pong-fast"], indirect=True)
def test_best_of_records_the_episode_with_the_highest_score(run, tmp_path, capsys, monkeypatch):
    played, renders = [], []
    render = recording.RenderedEpisode._render
    monkeypatch.setattr(
        recording.RenderedEpisode, "_render", lambda env: (renders.append(env.rendered), render(env))[1]
    )
    best = record_video(run, tmp_path / "best.webp", seed=3, best_of=3, watch=lambda _, scores: played.append(scores))
    scores = played[-1]
    assert len(scores) == 4 and scores[3] == max(scores[:3]) == best[0].score  # the same episode, played again
    assert best[0].seed == 3 + scores.index(max(scores)) and renders.count(True) == 61
    assert record_video(run, tmp_path / "alone.webp", seed=best[0].seed) == best
    assert (tmp_path / "alone.webp").read_bytes() == (tmp_path / "best.webp").read_bytes()
    assert cli.main(["record", str(run), "--best-of", "2", "--out", str(tmp_path / "x.gif")]) == 0
    assert "the best of 2 episodes" in (line := capsys.readouterr().out) and "seed 1000" in line
    assert f"episodes of {run / 'latest.pt'}, score" in line
    assert cli.main(["record", str(run), "--best-of", "2", "--out", str(tmp_path / "x.gif"), "--max-length", "3"]) == 0
    assert "the best of 2 episodes" in (line := capsys.readouterr().out) and "latest.pt, not to its end, score" in line


def test_the_overlay_leaves_the_picture_and_the_episode_as_they_are(run, tmp_path):
    plain = record_video(run, tmp_path / "plain.webp")
    assert record_video(run, tmp_path / "overlay.webp", overlay=True) == plain
    alone, beside = pictures_of(tmp_path / "plain.webp"), pictures_of(tmp_path / "overlay.webp")
    assert len(alone) == len(beside) and beside.shape[2] > 500
    assert np.array_equal(beside[:, :, :320], alone)
    assert all((beside[t, :, 320:] != beside[0, :, 320:]).any() for t in (10, -1))


def test_a_webp_of_many_pictures_raises_the_limit_of_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(video_writers, "SPOOLED", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    pictures = (np.full((2, 2, 3), number, np.uint8) for number in range(100))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 50, hard))
        video_writers.write_video(tmp_path / "many.webp", pictures, 15)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with Image.open(tmp_path / "many.webp") as video:
        assert video.n_frames == 100

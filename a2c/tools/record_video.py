"""Film a game of a frozen policy: what the agent does, to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import gymnasium as gym
import numpy as np
import torch
from PIL import Image
from torch import nn

from a2c.compute.compute import Compute
from a2c.compute.replica import make_replica
from a2c.envs.atari import FRAME_SKIP
from a2c.envs.make import row_seeds
from a2c.envs.single import checked_spec, is_atari, make_env
from a2c.metrics.files import write_atomically
from a2c.policy import initial_state, step
from a2c.processes.errors import failing
from a2c.tools.evaluate import choose
from a2c.tools.load import load_policy

EMULATOR_FPS = 60
MP4_WIDTH = 480  # pixels; smaller pictures (an Atari screen has 160) are scaled by a whole number
LONGEST = 30_000  # decisions; a policy may stand still, and not every game has a limit of its own


@dataclass
class Video:
    """What was filmed: score (game points) and length (decisions), and whether the game came to its end."""

    score: float = 0.0
    length: int = 0
    ended: bool = False


def record_video(
    run_dir: str | Path,
    out: str | Path,
    *,
    checkpoint: str = "latest.pt",
    greedy: bool = False,
    seed: int = 10_000,
) -> Video:
    """Play a whole game with the run's policy and write its pictures, one per decision, to `out`.

    `out` ends in `.mp4` or `.gif`; it is replaced when the film is complete. Raises ValueError for another
    ending, a missing directory or an environment that cannot be drawn, OSError where the film cannot be written,
    WorkerError for an environment that fails, FloatingPointError where the policy does, and what `load_policy` raises.
    """
    out = Path(out)
    if out.suffix not in WRITERS:
        raise ValueError(f"out must end in {' or '.join(WRITERS)}, got {str(out)!r}")
    config, net, _ = load_policy(Path(run_dir), checkpoint)
    if not out.parent.is_dir():
        raise ValueError(f"out must lie in a directory that exists, got {str(out)!r}")
    config = replace(config, backend="sync", num_envs=1, terminal_on_life_loss=False, seed=seed)
    spec, env_seed, video = checked_spec(config), row_seeds(config)[0], Video()
    with ExitStack() as closing:
        compute = Compute(config)
        closing.callback(compute.close)
        with failing(ValueError):
            env = make_env(config, spec, env_seed, render_mode="rgb_array")
        closing.callback(env.close)
        folder = closing.enter_context(TemporaryDirectory())
        fps = EMULATOR_FPS / FRAME_SKIP if is_atari(spec) else env.metadata.get("render_fps") or 30
        pictures = _play(env, make_replica(net, compute), env_seed, greedy, seed, video)
        try:
            film_file = Path(folder) / out.name
            WRITERS[out.suffix](film_file, pictures, fps)
            write_atomically(out, film_file.read_bytes())
        except OSError as error:
            raise OSError(f"{out} could not be written: {error}") from error
    return video


@torch.no_grad()
def _play(env: gym.Env, net: nn.Module, env_seed: int, greedy: bool, seed: int, video: Video) -> Iterator[np.ndarray]:
    """The pictures `[H, W, 3]` (RGB) of one game, which is entered in `film`."""
    generator = torch.Generator().manual_seed(seed)
    with failing():
        obs, _ = env.reset(seed=env_seed)
    assert isinstance(env.action_space, gym.spaces.Discrete)  # make_env sees to it
    first_action = int(env.action_space.start)
    rnn_state, starts = initial_state(net, 1), torch.ones(1, dtype=torch.bool)
    yield _picture(env)
    while not video.ended and video.length < LONGEST:
        logits, _, rnn_state = step(net, torch.from_numpy(np.array(obs)[None]), rnn_state, starts)
        action = choose(logits, greedy, generator)
        with failing():
            obs, reward, terminated, truncated, _ = env.step(int(action) + first_action)
        starts = torch.zeros(1, dtype=torch.bool)
        video.score, video.length, video.ended = video.score + float(reward), video.length + 1, terminated or truncated
        yield _picture(env)


def _picture(env: gym.Env) -> np.ndarray:
    try:
        with failing(gym.error.Error, NotImplementedError):
            picture = env.render()
    except (gym.error.Error, NotImplementedError) as error:
        raise ValueError(f"env must be one that can be drawn here, got {env.spec and env.spec.id}: {error}") from error
    if not isinstance(picture, np.ndarray):
        modes = env.metadata.get("render_modes")
        raise ValueError(f"env must have the render mode rgb_array, got {env.spec and env.spec.id} with {modes}")
    return picture


def _write_mp4(path: Path, pictures: Iterable[np.ndarray], fps: float) -> None:
    writer, written = cv2.VideoWriter(), 0
    try:
        for picture in pictures:
            scale = max(1, MP4_WIDTH // picture.shape[1])
            picture = picture.repeat(scale, axis=0).repeat(scale, axis=1)
            height, width = (size // 2 * 2 for size in picture.shape[:2])  # the codec wants even sizes
            if not written:
                writer.open(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (width, height))
            writer.write(np.ascontiguousarray(picture[:height, :width, ::-1]))
            written += 1
    finally:
        writer.release()
    video = cv2.VideoCapture(str(path))  # a full disk does not make the writer fail
    if video.get(cv2.CAP_PROP_FRAME_COUNT) != written:
        raise OSError("the film is not complete")
    video.release()


def _write_gif(path: Path, pictures: Iterable[np.ndarray], fps: float) -> None:
    frames = (Image.fromarray(picture).quantize(64) for picture in pictures)
    duration = 10 * max(2, round(100 / fps))  # ms; the format counts in hundredths of a second
    next(frames).save(path, save_all=True, append_images=frames, duration=duration, loop=0)


WRITERS: dict[str, Callable[[Path, Iterable[np.ndarray], float], None]] = {".mp4": _write_mp4, ".gif": _write_gif}

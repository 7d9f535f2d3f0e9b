"""Record a video: one episode of a frozen policy, to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import cv2
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from PIL import Image

from a2c.collector import Collector
from a2c.compute.compute import Compute
from a2c.compute.replica import make_replica
from a2c.envs.atari import FRAME_SKIP
from a2c.envs.make import run_seeds
from a2c.envs.single import checked_spec, is_atari, make_env
from a2c.envs.vector_env import MonitoredVectorEnv
from a2c.metrics.files import write_atomically
from a2c.processes.errors import raising_worker_error
from a2c.tools.load import load_policy

EMULATOR_FPS = 60
MP4_WIDTH, WEBP_WIDTH = 480, 320  # pixels; smaller pictures (an Atari screen has 160) are scaled by a whole number
KEY_FRAMES = 10_000  # pictures between two that are stored whole; the others are differences from the one before
LONGEST = 30_000  # decisions; a policy may stand still, and not every game has a limit of its own


class Video(NamedTuple):
    """What was recorded: score (game points) and length (decisions), and whether the episode came to its end."""

    score: float
    length: int
    ended: bool


def record_video(
    run_dir: str | Path,
    out: str | Path,
    *,
    checkpoint: str | None = None,
    greedy: bool = False,
    seed: int = 10_000,
) -> Video:
    """Play a whole episode with the run's policy and write its pictures, one per decision, to `out`.

    `out` ends in `.mp4`, `.gif` or `.webp`; it is replaced when the video is complete. Raises ValueError for another
    ending, a missing directory or an environment that cannot be rendered, OSError where the video cannot be written,
    WorkerError for an environment that fails, FloatingPointError where the policy's outputs are NaN or
    infinite, and what `load_policy` raises.
    """
    out = Path(out)
    if out.suffix not in WRITERS:
        raise ValueError(f"out must end in {' or '.join(WRITERS)}, got {str(out)!r}")
    config, net, _ = load_policy(Path(run_dir), checkpoint)
    if not out.parent.is_dir():
        raise ValueError(f"out must lie in a directory that exists, got {str(out)!r}")
    config = replace(config, backend="sync", num_envs=1, terminal_on_life_loss=False, seed=seed)
    spec, env_seed = checked_spec(config), run_seeds(config).envs[0]
    with ExitStack() as closing:
        compute = Compute(config)
        closing.callback(compute.close)
        with raising_worker_error(ValueError):
            env = RenderedEpisode(make_env(config, spec, env_seed, render_mode="rgb_array"))
        closing.callback(env.close)
        closing.callback(compute.wait_idle)  # after Ctrl-C its thread may still step it
        env.check(env_seed)
        vector = SyncVectorEnv([lambda: env], autoreset_mode=AutoresetMode.SAME_STEP)
        envs = MonitoredVectorEnv(vector, [env_seed])
        collector = Collector([envs], make_replica(net, compute), 1, compute, seed, greedy)
        folder = closing.enter_context(TemporaryDirectory())
        fps = EMULATOR_FPS / FRAME_SKIP if is_atari(spec) else env.metadata.get("render_fps") or 30
        try:
            path = Path(folder) / out.name
            WRITERS[out.suffix](path, _pictures(collector, env), fps)
            write_atomically(out, path.read_bytes())
        except OSError as error:
            raise OSError(f"{out} could not be written: {error}") from error
    return env.video


class RenderedEpisode(gym.Wrapper):
    """Renders every step of the first episode, before a vector environment resets it."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.rendered: list[np.ndarray] = []  # [H, W, 3] (RGB), until `take`
        self.video = Video(0.0, 0, False)  # so far

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; render it if it is the first."""
        result = self.env.reset(**kwargs)
        if not self.video.ended:
            self.rendered = [self._render()]
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One decision, rendered."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.rendered.append(self._render())
        score, length, _ = self.video
        self.video = Video(score + float(reward), length + 1, bool(terminated or truncated))
        return obs, reward, terminated, truncated, info

    def check(self, seed: int) -> None:
        """ValueError where the environment cannot be rendered here, WorkerError where it fails."""
        name, modes = self.env.spec and self.env.spec.id, self.env.metadata.get("render_modes")
        with raising_worker_error():
            self.env.reset(seed=seed)
        try:
            with raising_worker_error(gym.error.Error, NotImplementedError):
                picture = self.env.render()
        except (gym.error.Error, NotImplementedError) as error:
            raise ValueError(f"env must be one that can be rendered here, got {name}: {error}") from error
        if not isinstance(picture, np.ndarray):
            raise ValueError(f"env must have the render mode rgb_array, got {name} with {modes}")

    def take(self) -> list[np.ndarray]:
        """The pictures since the last call."""
        taken, self.rendered = self.rendered, []
        return taken

    def _render(self) -> np.ndarray:
        return np.asarray(self.env.render())


def _pictures(collector: Collector, env: RenderedEpisode) -> Iterator[np.ndarray]:
    """Play the episode; its pictures `[H, W, 3]`, one of its start and one per decision."""
    yield from env.take()
    while not env.video.ended and env.video.length < LONGEST:
        collector.collect()
        yield from env.take()


def _enlarge(picture: np.ndarray, width: int) -> np.ndarray:
    """The picture `[H, W, ...]`, scaled by the largest whole number that leaves it at most `width` wide."""
    scale = max(1, width // picture.shape[1])
    return picture.repeat(scale, axis=0).repeat(scale, axis=1)


def _write_mp4(path: Path, pictures: Iterable[np.ndarray], fps: float) -> None:
    writer, written = cv2.VideoWriter(), 0
    try:
        for picture in pictures:
            picture = _enlarge(picture, MP4_WIDTH)
            height, width = (size // 2 * 2 for size in picture.shape[:2])  # the codec wants even sizes
            if not written:
                writer.open(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (width, height))
            writer.write(np.ascontiguousarray(picture[:height, :width, ::-1]))
            written += 1
    finally:
        writer.release()
    video = cv2.VideoCapture(str(path))  # a full disk does not make the writer fail
    if video.get(cv2.CAP_PROP_FRAME_COUNT) != written:
        raise OSError("the video is not complete")
    video.release()


def _write_gif(path: Path, pictures: Iterable[np.ndarray], fps: float) -> None:
    frames = (Image.fromarray(picture).quantize(64) for picture in pictures)
    duration = 10 * max(2, round(100 / fps))  # ms; the format counts in hundredths of a second
    next(frames).save(path, save_all=True, append_images=frames, duration=duration, loop=0)


def _write_webp(path: Path, pictures: Iterable[np.ndarray], fps: float) -> None:
    """Lossless, which is also the smallest for the few colours of a game; equal pictures become one, shown longer."""
    frames: list[Image.Image] = []
    durations: list[float] = []  # ms
    before: np.ndarray | None = None
    for picture in pictures:
        if before is not None and np.array_equal(picture, before):
            durations[-1] += 1000 / fps
            continue
        before = picture.copy()
        frames.append(_palette_image(picture, WEBP_WIDTH))
        durations.append(1000 / fps)
    first, *rest = frames
    first.save(
        path, save_all=True, append_images=rest, duration=durations, loop=0, lossless=True, method=4, kmax=KEY_FRAMES
    )


def _palette_image(picture: np.ndarray, width: int) -> Image.Image:
    """The enlarged picture, a byte per pixel where it has at most 256 colours: Pillow holds all pictures at once."""
    colours, pixels = np.unique(picture @ np.array([1 << 16, 1 << 8, 1]), return_inverse=True)
    if len(colours) > 256:
        return Image.fromarray(_enlarge(picture, width))
    image = Image.fromarray(_enlarge(pixels.reshape(picture.shape[:2]).astype(np.uint8), width))
    image.putpalette(b"".join(int(colour).to_bytes(3) for colour in colours))
    return image


WRITERS: dict[str, Callable[[Path, Iterable[np.ndarray], float], None]] = {
    ".mp4": _write_mp4,
    ".gif": _write_gif,
    ".webp": _write_webp,
}

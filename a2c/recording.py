"""Film a game of a frozen policy: what the agent does, to look at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import torch
from PIL import Image

from a2c.atari import is_atari, make_env
from a2c.collector import sample
from a2c.envs import checked_spec
from a2c.evaluation import load_policy
from a2c.recurrent import empty_memory, step
from a2c.rules import FRAME_SKIP

EMULATOR_FPS = 60
MP4_WIDTH = 480  # pixels; smaller pictures (an Atari screen has 160) are scaled by a whole number
LONGEST = 30_000  # decisions; a policy that presses nothing can make a game last for ever


def record(
    run_dir: str | Path,
    out: str | Path,
    *,
    checkpoint: str = "latest.pt",
    greedy: bool = False,
    seed: int = 10_000,
) -> tuple[float, int]:
    """Play one whole game with the run's policy and write its pictures, one per decision, to `out`.

    `out` ends in `.mp4` or `.gif` and is replaced at the end, whole. Returns the game's score and its
    length in decisions. Raises ValueError for another ending, a missing directory or an environment that cannot
    be drawn, OSError where the film cannot be written.
    """
    out = Path(out)
    if out.suffix not in WRITERS:
        raise ValueError(f"out must end in {' or '.join(WRITERS)}, got {str(out)!r}")
    if not out.parent.is_dir():
        raise ValueError(f"out must lie in a directory that exists, got {str(out)!r}")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed must be at least 0 and below 2^31, got {seed}")
    config, net, _ = load_policy(Path(run_dir), checkpoint)
    config = replace(config, backend="sync", num_envs=1, end_of_life=False)
    spec = checked_spec(config)
    env = make_env(config, spec, seed, render_mode="rgb_array")
    fps = EMULATOR_FPS / FRAME_SKIP if is_atari(spec) else env.metadata.get("render_fps", 30)
    played = {"score": 0.0, "length": 0}
    temporary = out.with_name(f".{out.name}.tmp{out.suffix}")
    try:
        WRITERS[out.suffix](temporary, _play(env, net, greedy, seed, played), fps)
        os.replace(temporary, out)
    finally:
        with suppress(OSError):
            temporary.unlink()
        env.close()
    return played["score"], int(played["length"])


@torch.no_grad()
def _play(
    env: gym.Env, net: torch.nn.Module, greedy: bool, seed: int, played: dict[str, float]
) -> Iterable[np.ndarray]:
    """The pictures `[H, W, 3]` (RGB) of one game; adds score and length up in `played`."""
    generator = torch.Generator().manual_seed(seed)
    obs, _ = env.reset(seed=seed)
    memory, starts, over = empty_memory(net, 1), torch.ones(1, dtype=torch.bool), False
    yield _picture(env)
    while not over and played["length"] < LONGEST:
        logits, _, memory = step(net, torch.from_numpy(np.array(obs)[None]), memory, starts)
        action = logits.argmax(dim=1) if greedy else sample(logits.float(), generator)[0]
        obs, reward, terminated, truncated, _ = env.step(int(action))
        over, starts = terminated or truncated, torch.zeros(1, dtype=torch.bool)
        played["score"] += float(reward)
        played["length"] += 1
        yield _picture(env)


def _picture(env: gym.Env) -> np.ndarray:
    try:
        picture = env.render()
    except gym.error.Error as error:
        raise ValueError(f"env must be drawable here, got {env.spec.id if env.spec else env}: {error}") from error
    if picture is None:
        raise ValueError(f"env must have the render mode rgb_array, got {env.metadata.get('render_modes')}")
    return picture


def _write_mp4(path: Path, pictures: Iterable[np.ndarray], fps: float) -> None:
    writer = None
    for picture in pictures:
        scale = max(1, MP4_WIDTH // picture.shape[1])
        picture = picture.repeat(scale, axis=0).repeat(scale, axis=1)
        height, width = (size // 2 * 2 for size in picture.shape[:2])  # the codec wants even sizes
        if writer is None:
            writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), fps, (width, height))
            if not writer.isOpened():
                raise OSError(f"{path} cannot be written as a film")
        writer.write(np.ascontiguousarray(picture[:height, :width, ::-1]))
    writer.release()


def _write_gif(path: Path, pictures: Iterable[np.ndarray], fps: float) -> None:
    first, *rest = (Image.fromarray(picture).quantize(64) for picture in pictures)
    first.save(path, save_all=True, append_images=rest, duration=10 * round(100 / fps), loop=0)


WRITERS: dict[str, Callable[[Path, Iterable[np.ndarray], float], None]] = {".mp4": _write_mp4, ".gif": _write_gif}

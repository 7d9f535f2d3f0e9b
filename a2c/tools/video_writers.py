"""Videos as files: pictures in, one .webp, .gif or .mp4 out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from a2c.config.extras import has_extra
from a2c.config.validation import check_ending
from a2c.processes.limits import allow_open_files

WIDTHS = {".mp4": 480, ".gif": 160, ".webp": 320}  # pixels; smaller pictures are scaled by a whole number
KEY_FRAMES = 10_000  # pictures between two that are stored whole; the others are differences from the one before
SPOOLED = 50  # pictures in one file, before they are written as WebP
H264 = {"crf": "18", "preset": "medium"}  # nearly without loss


def check_writer(out: Path) -> None:
    """ValueError if no video can be written to a file with this name."""
    check_ending(out, list(WRITERS))
    if out.suffix == ".mp4" and not has_extra("video"):
        need = 'pip install "a2c[video]" brings what .mp4 needs'
        raise ValueError(f"out must end in .gif or .webp where PyAV is not installed, got {str(out)!r}: {need}")


def write_video(path: Path, pictures: Iterator[np.ndarray], fps: float) -> None:
    """Write `pictures` (`[H, W, 3]` RGB, at least one, all of one size), `fps` of them a second.

    The name ends as `check_writer` demands. OSError if the disk refuses.
    """
    WRITERS[path.suffix](path, pictures, fps)


def enlarge(picture: np.ndarray, width: int) -> np.ndarray:
    """The picture `[H, W, ...]`, scaled by the largest whole number that leaves it at most `width` wide."""
    scale = max(1, width // picture.shape[1])
    return picture.repeat(scale, axis=0).repeat(scale, axis=1)


def _write_mp4(path: Path, pictures: Iterator[np.ndarray], fps: float) -> None:
    """H.264 in 4:2:0, with the index at the start of the file: what browsers play."""
    import av

    pictures = (_even(enlarge(picture, WIDTHS[".mp4"])) for picture in pictures)
    first = next(pictures)
    settings: dict[str, Any] = {"height": first.shape[0], "width": first.shape[1], "pix_fmt": "yuv420p"}
    try:
        with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
            stream = container.add_stream("libx264", Fraction(fps).limit_denominator(1000), H264, **settings)
            for picture in itertools.chain([first], pictures):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode(None))
    except av.FFmpegError as error:
        raise OSError(f"the video is not complete: {error}") from error


def _even(picture: np.ndarray) -> np.ndarray:
    """The picture without a last odd row or column: 4:2:0 wants even sizes."""
    height, width = (size // 2 * 2 for size in picture.shape[:2])
    return np.ascontiguousarray(picture[:height, :width])


def _write_gif(path: Path, pictures: Iterator[np.ndarray], fps: float) -> None:
    frames = (Image.fromarray(picture).quantize(64) for picture in pictures)
    duration = 10 * max(2, round(100 / fps))  # ms; the format counts in hundredths of a second
    next(frames).save(path, save_all=True, append_images=frames, duration=duration, loop=0)


def _write_webp(path: Path, pictures: Iterator[np.ndarray], fps: float) -> None:
    """Lossless, which is also the smallest for the few colours of a game; equal pictures become one, shown longer.

    Pillow wants all pictures before it writes the first, so they wait in files beside `path`.
    """
    durations: list[float] = []  # ms
    names = _spool(path, _runs(pictures, fps, durations))
    allow_open_files(len(names), f"the video must fit the limit of open files, got {len(durations):,} pictures", ".mp4")
    with ExitStack() as closing:
        files = [closing.enter_context(Image.open(name)) for name in names]
        settings: dict[str, Any] = {"lossless": True, "method": 4, "kmax": KEY_FRAMES, "loop": 0}
        files[0].save(path, save_all=True, append_images=files[1:], duration=durations, **settings)


def _runs(pictures: Iterable[np.ndarray], fps: float, durations: list[float]) -> Iterator[Image.Image]:
    """Each picture that differs from the one before; how long it is shown (ms) is appended to `durations`."""
    before: np.ndarray | None = None
    for picture in pictures:
        if before is not None and np.array_equal(picture, before):
            durations[-1] += 1000 / fps
            continue
        before = picture.copy()
        durations.append(1000 / fps)
        yield Image.fromarray(enlarge(picture, WIDTHS[".webp"]))


def _spool(path: Path, images: Iterator[Image.Image]) -> list[Path]:
    """The images in files of at most `SPOOLED` each, which are named after `path`."""
    names: list[Path] = []
    while some := list(itertools.islice(images, SPOOLED)):
        names.append(path.with_suffix(f".{len(names)}.tiff"))
        some[0].save(names[-1], save_all=True, append_images=some[1:], compression="tiff_deflate")
    return names


WRITERS: dict[str, Callable[[Path, Iterator[np.ndarray], float], None]] = {
    ".mp4": _write_mp4,
    ".gif": _write_gif,
    ".webp": _write_webp,
}

"""A recorded video on TensorBoard's page of a run, among its images, where a GIF moves."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from a2c.metrics.logger import EventFile

FOLDER = Path("tensorboard", "video")  # apart from the run's own files: TensorBoard follows the newest in a directory


def check_gif(out: Path, path: Path) -> None:
    """ValueError if `out` is not the name of a video that TensorBoard shows, or `path` belongs to no run."""
    if out.suffix != ".gif":
        raise ValueError(f"out must end in .gif with tensorboard, got {str(out)!r}")
    _run_of(path)


def _run_of(path: Path) -> Path:
    """The run directory that `path` is, or that holds this checkpoint or policy."""
    if not path.is_file():
        return path
    for folder in path.absolute().parents[:2]:
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(f"run_dir must be a run directory, or a file in one, with tensorboard, got {str(path)!r}")


def log_video(run_dir: Path, gif: Path, env_steps: int) -> Path:
    """Add the video `gif` to the events of a run, at the decisions that its policy has learned from.

    Returns the directory of the events; OSError if they cannot be written.
    """
    folder = _run_of(run_dir) / FOLDER
    if folder.parent.is_symlink():
        raise OSError(f"{folder.parent} must not be a link")
    with Image.open(gif) as picture:
        size = picture.height, picture.width
    events = EventFile(folder, None)
    events.image("video", gif.read_bytes(), size, env_steps)
    events.close()
    return folder

"""The directory of a run: its name, and one process at a time in it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from a2c.config import Config

LOCK = "lock"
LEFTOVERS = {LOCK, "config.json", "metrics.csv", "episodes.csv", "latest.pt.tmp"}  # of a start that was killed


def run_directory(config: Config) -> Path:
    """Where the run lives: a resumed one's, a new or empty one; ValueError where others' files lie."""
    if config.resume is not None:
        return config.resume
    name = f"{config.env.replace('/', '-')}-{config.preset}-{config.seed}-{datetime.now():%Y%m%d-%H%M%S}"
    run_dir = config.run_dir or Path("runs") / name
    try:
        taken = not run_dir.is_dir() or any(path.name not in LEFTOVERS for path in run_dir.iterdir())
        taken = taken and (run_dir.exists() or run_dir.is_symlink())
    except (OSError, ValueError) as error:  # a name that is too long, a null byte, no permission
        raise ValueError(f"run_dir must be a directory that can be used, got {str(run_dir)!r}: {error}") from error
    if taken:
        raise ValueError(f"run_dir must be new or empty, got {run_dir}; --resume {run_dir} goes on with a run")
    return run_dir


def make_lock(run_dir: Path) -> FileLock:
    """The lock of a run directory. The system frees it when its process ends, however that happens."""
    return FileLock(run_dir / LOCK, thread_local=False)


def take(lock: FileLock) -> None:
    """Make the directory and hold its lock; ValueError where another process does or neither can be written."""
    run_dir = Path(lock.lock_file).parent
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"run_dir must not be in use by another process, got {run_dir}: wait for it or end it"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"run_dir must be a directory that can be written, got {run_dir}: {reason}") from error

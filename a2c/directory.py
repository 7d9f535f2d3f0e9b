"""The directory of a run: its name, and one process at a time in it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from a2c.config import Config
from a2c.files import TEMPORARY

LOCK = "lock"
FILES = ("config.json", "metrics.csv", "episodes.csv", "latest.pt", "previous.pt", "best.pt", "curve.png")
STARTED = FILES[:3]  # what a start writes before its first checkpoint
GROWING = (LOCK, "metrics.csv", "episodes.csv", "tensorboard")  # opened where they lie, so they must lie here
LEFTOVERS = {LOCK, *STARTED, *(name + TEMPORARY for name in (*STARTED, "latest.pt"))}  # of a start that was killed


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


class InUse(ValueError):
    """Another process holds the lock of the run directory."""


class RunLock:
    """The lock of a run directory. The system frees it when its process ends, however that happens.

    On a file system without such locks a file stands for it, with the process and host that made it.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._lock = FileLock(run_dir / LOCK, thread_local=False)
        self._file: os.stat_result | None = None  # the lock file that is held

    def take(self) -> None:
        """Make the directory, hold its lock, remove what a killed process left half-written.

        ValueError where another process holds it, where neither can be written, or where a link lies in the way.
        """
        try:
            self._take()
        except (OSError, ValueError) as error:
            if isinstance(error, InUse):
                raise
            where = f"{self.run_dir}: {getattr(error, 'strerror', None) or error}"
            raise ValueError(f"run_dir must be a directory that can be written, got {where}") from error

    def keep(self) -> None:
        """Make the directory and its lock again where somebody has removed them.

        InUse where another process holds the lock by now, OSError where the disk refuses.
        """
        with suppress(FileNotFoundError):
            if self._file is not None and os.path.samestat(self._file, os.stat(self.run_dir / LOCK)):
                return
        self._lock.release(force=True)
        self._take()

    def release(self) -> None:
        """Let others in."""
        self._file = None
        self._lock.release(force=True)

    def _take(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name in GROWING:
            if (self.run_dir / name).is_symlink():
                raise OSError(f"{name} must not be a link; remove it")
        try:
            self._acquire()
        except Timeout:
            advice = "wait for it or end it"
            if isinstance(self._lock, SoftFileLock):
                advice += f"; if no process on any host uses it, remove {self.run_dir / LOCK}"
            raise InUse(f"run_dir must not be in use by another process, got {self.run_dir}: {advice}") from None
        self._file = os.stat(self.run_dir / LOCK)
        for name in FILES:
            (self.run_dir / (name + TEMPORARY)).unlink(missing_ok=True)

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            # filelock takes over a dead process's file where two files can change names; network file systems refuse.
            if not (isinstance(self._lock, SoftFileLock) and _of_a_dead_process(self.run_dir / LOCK)):
                raise
            (self.run_dir / LOCK).unlink(missing_ok=True)
            self._lock.acquire(timeout=0)


def _of_a_dead_process(path: Path) -> bool:
    """True for a lock file whose process ran on this host and runs no more."""
    try:
        pid, host = path.read_text(encoding="utf-8").splitlines()[:2]
        if host == socket.gethostname():
            os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError, ValueError):
        pass
    return False

"""The directory of a run: its name, and a lock that keeps other processes out."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shlex
import socket
import tempfile
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from a2c import __version__
from a2c.config.config import Config
from a2c.metrics.files import BLOCK, TEMPORARY, open_regular, read_small

LOCK = "lock"
FILES = ("config.json", "about.json", "metrics.csv", "episodes.csv", "latest.pt", "previous.pt", "best.pt", "curve.png")
STARTED = FILES[:4]  # what a start writes before its first checkpoint
POLICIES = "policies"  # directory of the policy files that a run keeps
# Written in place, so none may be a link.
GROWING = (LOCK, "metrics.csv", "episodes.csv", "tensorboard", "wandb", POLICIES)
LEFTOVERS = {LOCK, *STARTED, *(name + TEMPORARY for name in (*STARTED, "latest.pt"))}  # of a start that was killed


def run_directory(config: Config, again: bool = False) -> tuple[Config, Path]:
    """The directory of a resumed run, else a new or empty one; ValueError if it holds other files.

    `again`: torchrun has started the run again after a failure; where there is a checkpoint, it is resumed.
    """
    config = _started_again(config, again)
    if config.resume is not None:
        return config, config.resume
    time = f"{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]  # milliseconds: scripts begin several at once
    name = f"{config.env.replace('/', '-')}-{config.preset}-{config.seed}-{time}"
    run_dir = config.run_dir or Path("runs") / name
    try:
        taken = not run_dir.is_dir() or not all(_is_leftover(path) for path in run_dir.iterdir())
        taken = taken and (run_dir.exists() or run_dir.is_symlink())
        lost = taken and not any(run_dir.glob("*.pt")) and any((run_dir / name).exists() for name in GROWING[1:])
    except (OSError, ValueError) as error:  # a name that is too long, a null byte, no permission
        raise ValueError(f"run_dir must be a directory that can be used, got {str(run_dir)!r}: {error}") from error
    if lost:
        why = "holds no checkpoint, so no run can continue there; remove it if its rows are not needed"
        raise ValueError(f"run_dir must be new or empty, got {run_dir}: it {why}")
    if taken:
        how = f"; --resume {shlex.quote(str(run_dir))} resumes it" if (run_dir / "config.json").is_file() else ""
        raise ValueError(f"run_dir must be new or empty, got {run_dir}{how}")
    return config, run_dir


def claim(lock: RunLock, config: Config) -> None:
    """Make the run directory and keep other processes out; ValueError if that is impossible, or a run is there now."""
    lock.take()
    paths = [path for name in {*FILES, *GROWING} if (path := lock.run_dir / name).exists()]
    if config.resume is None and not all(map(_is_leftover, paths)):
        lock.release()
        raise ValueError(f"run_dir must be new or empty, got {lock.run_dir}: another run has begun there")


def times_restarted() -> int:
    """How often torchrun has started this process again; hosts may differ: one that only joins again counts none."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _started_again(config: Config, again: bool) -> Config:
    """The config that continues a run which torchrun has started again; ValueError if it could not be found then."""
    if config.resume is not None or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return config
    if config.run_dir is None:
        rule = "run_dir must be given with --max-restarts, so that a run that is started again finds its checkpoint"
        raise ValueError(f"{rule}, got {config.run_dir}")
    resumes = again and (config.run_dir / "latest.pt").exists()
    return replace(config, resume=config.run_dir, run_dir=None) if resumes else config


def saved_config(run_dir: str | Path) -> Config:
    """The settings with which the run in `run_dir` can be resumed; ValueError if its config.json cannot be read."""
    where = str(run_dir)
    try:
        text = read_small(Path(os.path.expanduser(run_dir)) / "config.json")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"resume must be a run directory with a config.json, got {where!r} ({reason})") from error
    try:
        return replace(Config.from_json(text), run_dir=None, stop_after=0)
    except (TypeError, ValueError) as error:
        rule = f"resume must be a run whose config.json a2c {__version__} can read"
        raise ValueError(f"{rule}, got {where!r}: damaged, or of another version ({error})") from error


def _is_leftover(path: Path) -> bool:
    """True for a file that a killed start may leave: it writes no row before its first checkpoint."""
    if path.name in GROWING and path.name in STARTED:
        with open(path, "rb", opener=open_regular) as table:
            table.readline(BLOCK)
            return not table.read(1)
    return path.name in LEFTOVERS or path.name.startswith(LOCK + ".")  # a stale lock that was set aside


class InUse(ValueError):
    """Another process holds the lock of the run directory."""


class RunLock:
    """The lock of a run directory. The operating system frees it when the process ends, however that happens.

    On a file system without such locks it is a file that names the process and host that made it.
    """

    def __init__(self, run_dir: Path) -> None:
        self.given, self.run_dir = run_dir, run_dir.absolute()  # the program may change its working directory
        self._lock: BaseFileLock = FileLock(self.run_dir / LOCK, thread_local=False)
        self._file: os.stat_result | None = None  # the lock file that is held

    def take(self) -> None:
        """Make the directory, take its lock, remove half-written files of a killed process.

        ValueError if another process holds the lock, the directory cannot be written, or a link is in
        the way.
        """
        try:
            self._take()
        except (OSError, ValueError) as error:
            if isinstance(error, InUse):
                raise
            where = f"{self.run_dir}: {getattr(error, 'strerror', None) or error}"
            raise ValueError(f"run_dir must be a directory that can be written, got {where}") from error

    def keep(self) -> None:
        """Make the directory and its lock again where they have been removed.

        InUse if another process has taken the lock meanwhile, OSError if the disk refuses.
        """
        with suppress(FileNotFoundError):
            if self._file is not None and os.path.samestat(self._file, os.stat(self.run_dir / LOCK)):
                return
        self._lock.release(force=True)
        self._take()

    def release(self) -> None:
        """Release the lock, if it is held."""
        self._file = None
        self._lock.release(force=True)

    def _take(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # filelock's own fallback differs from version to version.
        if not isinstance(self._lock, SoftFileLock) and not _has_locks(self.run_dir):
            self._lock = SoftFileLock(self.run_dir / LOCK, thread_local=False)
        for name in GROWING:
            if (self.run_dir / name).is_symlink():
                raise OSError(f"{name} must not be a link; remove it")
        try:
            self._acquire()
        except Timeout:
            advice = "wait for it or end it (in a program: close() the Trainer that has the lock)"
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
            # filelock takes over the file of a dead process only where two files can be exchanged, which network file
            # systems refuse.
            if not (isinstance(self._lock, SoftFileLock) and self._remove_stale()):
                raise
            self._lock.acquire(timeout=0)

    def _remove_stale(self) -> bool:
        """Remove the lock file of a dead process; False if its owner may be alive.

        Another process may have removed it and taken the lock since it was read, so it is renamed and read again.
        """
        lock, aside = self.run_dir / LOCK, self.run_dir / f"{LOCK}.{secrets.token_hex(8)}{TEMPORARY}"
        if not _of_a_dead_process(lock):
            return False
        with suppress(FileNotFoundError):
            os.rename(lock, aside)
            if not _of_a_dead_process(aside):
                os.rename(aside, lock)  # a process that took the lock meanwhile notices before its next write
                return False
            aside.unlink()
        return True


def _has_locks(directory: Path) -> bool:
    """False for a directory on a file system without locks; True if no file can be made to find out."""
    try:
        with tempfile.TemporaryFile(prefix=f"{LOCK}.", dir=directory) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP)
    return True


def _of_a_dead_process(path: Path) -> bool:
    """True for a lock file whose process was on this host and has ended."""
    try:
        pid, host = path.read_text(encoding="utf-8").splitlines()[:2]
        if host == socket.gethostname():
            os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError, ValueError):
        pass
    return False

"""Worker processes: how they start, what each of them does first, how they are ended."""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import multiprocessing.util  # registers its function at exit before ours, which is therefore called first
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

# May be sent to the whole process group; the parent handles them. Windows has no SIGHUP, which a closed terminal sends.
SIGNALS = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
LONGEST_TEMPORARY = 107 - len("/listener-12345678")  # bytes of a path: a socket in it may have 107
START_TIMEOUT = 300.0  # seconds in which a worker process must have started
WORKER_NAME = "A2CWorker"  # part of the name of every process that this package starts
BEFORE = "A2C_ENVIRON_BEFORE"  # variable with what `_safe_path` changes
_changing_environ = threading.Lock()
_hiding_main = threading.RLock()  # two threads that hide and restore it in turn would restore the wrong one


def worker_context(preload: Sequence[str]) -> str:
    """The start method: forkserver where that is safe, else spawn. The server imports `preload` once for all workers.

    `SIGNALS` are blocked in the server and in our workers, which are ended by `kill()`. Processes that the
    caller's program starts by the same server receive them as usual.
    """
    # macOS: system libraries that the server has loaded may not survive a fork.
    if sys.platform == "darwin" or "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    from multiprocessing import forkserver, resource_tracker

    if len(os.fsencode(multiprocessing.util.get_temp_dir())) > LONGEST_TEMPORARY:
        rule = "the directory of temporary files (TMPDIR) must have a path short enough for sockets"
        raise ValueError(f"{rule}, got {tempfile.gettempdir()!r}")
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, *preload])
    with _safe_path():
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            forkserver.ensure_running()  # the server and its children inherit the mask, see `_unblock_others`
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if sys.platform == "linux":  # a server that was started earlier has the limit of then, and opens a file per worker
        import resource

        server: Any = forkserver._forkserver
        resource.prlimit(server._forkserver_pid, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
    return "forkserver"


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Python processes that start in this context import no modules of the working directory, as with `-P`."""
    changes = {"PYTHONPATH": module_environ()["PYTHONPATH"], "PYTHONSAFEPATH": "1"}
    with _changing_environ:
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes, **{BEFORE: json.dumps(before)})
        try:
            yield
        finally:
            _restore_environ()


def _restore_environ() -> None:
    """Undo what `_safe_path` has changed; in the fork server, too, for the programs that an environment may start."""
    for name, value in json.loads(os.environ.pop(BEFORE)).items():
        del os.environ[name]
        if value is not None:
            os.environ[name] = value


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Workers that start in this context do not import the caller's script, nor all that it imports."""
    main = sys.modules["__main__"]
    with _hiding_main:
        names = [name for name in ("__file__", "__spec__") if name in main.__dict__]
        hidden: dict[str, Any] = {name: main.__dict__.pop(name) for name in names}
        main.__spec__ = None
        try:
            yield
        finally:
            main.__dict__.update(hidden)


def is_ours(process: BaseProcess) -> bool:
    """Whether this package started the process, not the caller's program."""
    return WORKER_NAME in process.name


def prepare_worker() -> None:
    """The first call in a new worker: ignore the signals that the parent handles, and end when the parent has ended."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def module_environ() -> dict[str, str]:
    """Environment variables for a `python -P` that finds the modules of this process, none of the working directory."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def stop_with_input() -> None:
    """Send this process SIGTERM when its standard input, a pipe from the process that started it, is closed."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def stop_with_parent() -> None:
    """Send this process SIGTERM when the process that has started it has ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent has ended, even while its environment hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a worker
    wait([parent.sentinel])
    os._exit(1)


def end_processes(processes: Sequence[BaseProcess]) -> None:
    """Kill the processes, whatever they are doing, and wait until they have ended."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


@atexit.register
def _end_workers() -> None:
    """Kill our workers at exit: multiprocessing would send them SIGTERM, which they ignore, and wait for ever."""
    for process in multiprocessing.active_children():
        if is_ours(process):
            process.kill()


def _unblock_others(_: object) -> None:
    """In a new child of the fork server: unblock the signals where the child is not one of ours."""
    if not is_ours(multiprocessing.current_process()):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


# Only in the fork server, which is started by this line of code and has no `parent_process`.
_STARTED_BY = "from multiprocessing.forkserver import main; main("
if multiprocessing.parent_process() is None and "".join(sys.orig_argv[-1:]).startswith(_STARTED_BY):
    multiprocessing.util.register_after_fork(_unblock_others, _unblock_others)
    if BEFORE in os.environ:
        _restore_environ()

"""Worker processes: how they start, and what every one of them does first. No torch may enter this room."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait


def worker_context(preload: Sequence[str]) -> str:
    """forkserver where there is one: it imports `preload` once, and its workers are copies of it."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    from multiprocessing import forkserver, resource_tracker

    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()  # its workers inherit the mask: Ctrl-C is the parent's business
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return "forkserver"


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Keep workers from importing the caller's script, and all that it imports, once per process."""
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def settle_in() -> None:
    """In a new worker: Ctrl-C is the parent's business, and the worker ends when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def stop_with_input() -> None:
    """Ask this process to stop (SIGTERM) when its input, the pipe of the process that started it, is closed."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when the run's process is gone, even while its environment hangs."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)

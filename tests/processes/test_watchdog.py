"""The watchdog around requests to worker processes."""

import threading
import time
from contextlib import closing
from multiprocessing import get_context
from types import SimpleNamespace

import pytest

from a2c.processes.errors import WorkerError
from a2c.processes.start import WORKER_NAME, end_processes
from a2c.processes.watchdog import Watchdog


@pytest.fixture
def worker():
    """A process that hangs."""
    process = get_context("spawn").Process(target=time.sleep, args=(1e6,), name=WORKER_NAME, daemon=True)
    process.start()
    yield process
    end_processes([process])


def test_watchdog_kills_a_worker_that_does_not_respond_and_raises_worker_error(worker):
    watchdog = Watchdog(0.4, lambda: [worker], "a test")
    said = r"^a test did not respond within 0\.4 seconds$"
    with closing(watchdog), pytest.raises(WorkerError, match=said) as raised, watchdog:
        worker.join()  # returns because the watchdog kills the process
        raise EOFError
    assert isinstance(raised.value.__cause__, EOFError) and not worker.is_alive()


def test_watchdog_leaves_errors_alone_while_the_time_is_not_up(worker):
    watchdog = Watchdog(60.0, lambda: [worker])
    with closing(watchdog), pytest.raises(EOFError), watchdog:
        raise EOFError
    assert worker.is_alive() and not watchdog.expired


def test_watchdog_kills_all_workers_once_one_has_died_long_before_the_time_is_up(worker):
    dead = get_context("spawn").Process(target=time.sleep, args=(0,), name=WORKER_NAME, daemon=True)
    dead.start()
    dead.join()
    watchdog = Watchdog(20.0, lambda: [dead, worker])
    with closing(watchdog), pytest.raises(EOFError), watchdog:
        worker.join()
        raise EOFError
    assert not watchdog.expired and not worker.is_alive()


@pytest.mark.parametrize("answered", [True, False])
def test_watchdog_counts_the_time_of_each_request_by_itself(answered):
    watchdog, ticks = Watchdog(2.0, list), []

    def tick(seconds):
        if answered:
            watchdog.__exit__(None, None, None)
            watchdog.__enter__()
        ticks.append(seconds)
        return len(ticks) == 20  # the watchdog is closed

    watchdog._thread, watchdog._closed = threading.current_thread(), SimpleNamespace(wait=tick)
    with watchdog:
        watchdog._watch()
    assert sum(ticks) == 10.0 and watchdog.expired != answered

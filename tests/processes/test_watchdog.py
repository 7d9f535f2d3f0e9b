"""The watchdog around requests to worker processes."""

import time
from contextlib import closing
from multiprocessing import get_context

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

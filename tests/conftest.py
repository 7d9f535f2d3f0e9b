"""What all tests share: one fork server with everything loaded, and Ctrl-C as in a terminal."""

import signal

import pytest

from a2c.processes.start import worker_context


@pytest.fixture(autouse=True, scope="session")
def _fork_server(_interrupts):
    worker_context(["a2c.envs.make", "a2c.algorithms.a3c", "a2c.algorithms.ga3c", "torch._dynamo"])


@pytest.fixture(autouse=True, scope="session")
def _interrupts():
    """A shell starts a job in the background with SIGINT ignored, and so would every process that the tests start."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

"""What all tests share: one fork server with everything loaded, Ctrl-C as in a terminal, no picture of each run."""

import signal

import pytest

from a2c.metrics import plots
from a2c.processes.start import worker_context
from a2c.tools import compare_plot, plot  # noqa: F401  they keep the real `picture`


@pytest.fixture(autouse=True, scope="session")
def _fork_server(_interrupts):
    worker_context(["a2c.envs.make", "a2c.algorithms.a3c", "a2c.algorithms.ga3c", "torch._dynamo"])


@pytest.fixture(autouse=True, scope="session")
def _interrupts():
    """A shell starts a job in the background with SIGINT ignored, and so would every process that the tests start."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _buffered_output():
    """The commands that the tests start write through a buffer, as in a shell, wherever the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_pictures():
    """curve.png has no picture, which would take most of the time of a short run; other drawings are as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "picture", lambda figure, kind="png": b"\x89PNG")
        yield

"""One fork server for all tests, with everything loaded: the workers of a3c and ga3c start in no time."""

import pytest

from a2c.processes.start import worker_context


@pytest.fixture(autouse=True, scope="session")
def _fork_server():
    worker_context(["a2c.envs.make", "a2c.algorithms.a3c", "a2c.algorithms.ga3c", "torch._dynamo"])

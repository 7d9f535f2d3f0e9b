"""The error of an environment, or of the process that runs it."""

import pytest

from a2c.processes.errors import WorkerError, is_out_of_memory, raising_worker_error, worker_error


def test_worker_error_is_one_line_with_the_traceback_of_the_environment():
    trace = "Traceback (most recent call last):\n  File x\nValueError: the pole broke\n"
    error = worker_error(RuntimeError(trace))
    assert str(error) == "an environment failed: ValueError: the pole broke" and error.trace == trace
    assert (
        str(worker_error(EOFError(), "a worker"))
        == "the process of a worker died, perhaps killed because memory ran out"
    )
    assert str(worker_error(KeyError("x"))) == "an environment failed: KeyError: 'x'"


def test_raising_worker_error_turns_all_errors_but_the_named_ones_into_worker_errors():
    with pytest.raises(WorkerError, match="an environment failed: KeyError: 'x'"), raising_worker_error(ValueError):
        raise KeyError("x")
    with pytest.raises(ValueError, match="bad"), raising_worker_error(ValueError):
        raise ValueError("bad")
    first = WorkerError("first", "trace")
    with pytest.raises(WorkerError) as raised, raising_worker_error():
        raise first
    assert raised.value is first


def test_memory_has_run_out_where_the_last_error_says_so_and_not_where_a_process_has_died():
    trace = "Traceback (most recent call last):\n  CUDA out of memory\nValueError: no such level\n"
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(RuntimeError("CUDA out of memory."))
    assert is_out_of_memory(worker_error(MemoryError())) and not is_out_of_memory(RuntimeError("ReplayMemoryError"))
    assert is_out_of_memory(WorkerError("the predictor failed: OutOfMemoryError: CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("shapes differ")) and not is_out_of_memory(
        worker_error(RuntimeError(trace))
    )
    assert not is_out_of_memory(worker_error(EOFError(), "a worker"))


def test_a_message_of_several_lines_becomes_one_line_with_its_type():
    trace = (
        "Traceback (most recent call last):\n"
        '  File "env.py", line 3, in step\n'
        "    raise ValueError(message)\n"
        "ValueError: bad action:\n"
        "  expected 3 joints\n"
        "  got 2\n"
    )
    assert str(worker_error(RuntimeError(trace))) == (
        "an environment failed: ValueError: bad action: expected 3 joints got 2"
    )
    assert str(worker_error(ValueError("two\nlines"))) == "an environment failed: ValueError: two lines"

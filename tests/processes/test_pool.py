"""A pool of worker processes: whatever happens to one of them, the run does not wait for it."""

import time
from contextlib import closing

import psutil
import pytest
import torch
import troubled

from a2c.algorithms.worker_tasks import MOST_SHARED, move_to_shared_memory
from a2c.processes import pool
from a2c.processes.errors import WorkerError
from a2c.processes.pool import WorkerPool


def test_receive_returns_messages_in_order_with_the_number_of_their_worker():
    received = {0: [], 1: []}
    with closing(WorkerPool(troubled.two_words, [("a", "b"), ("c", [1, 2])], 5.0)) as workers:
        while workers.at_work:
            for number, message in workers.receive():
                received[number].append(message)
    assert received == {0: ["a", "b"], 1: ["c", [1, 2]]}


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (troubled.half_a_message, "a worker did not respond within 1 seconds"),
        (troubled.hang, "a worker did not respond within 1 seconds"),
        (troubled.death, "the process of a worker died"),
        (troubled.mistake, "a worker failed: KeyError: 'nothing there'"),
    ],
)
def test_receive_raises_where_a_worker_hangs_dies_or_fails(work, said, monkeypatch):
    monkeypatch.setattr(pool, "START_TIMEOUT", 0.0)
    with closing(WorkerPool(work, [(), ()], 1.0)) as workers:
        for number in workers.waited:  # only the start may take longer
            workers.waited[number] = -20.0 if work is not troubled.hang else 0.0
        began = time.perf_counter()
        with pytest.raises(WorkerError, match=said) as raised:
            while workers.at_work:
                workers.receive()
        assert time.perf_counter() - began < 20
        if work is troubled.mistake:
            assert 'raise KeyError("nothing there")' in raised.value.trace
    assert not any(psutil.pid_exists(process.pid) for process in workers.processes)


def test_await_all_returns_the_first_message_of_every_worker():
    with closing(WorkerPool(troubled.two_words, [(n, 10 + n) for n in range(3)], 5.0)) as workers:
        assert sorted(workers.await_all())[:3] == [0, 1, 2]


def test_receive_raises_for_a_worker_that_hangs_while_another_keeps_sending():
    with closing(WorkerPool(troubled.chatter_or_hang, [(True,), (False,)], 1.0)) as workers:
        workers.await_all()
        began = time.perf_counter()
        with pytest.raises(WorkerError, match="did not respond within 1 seconds"):
            while time.perf_counter() - began < 20:
                workers.receive()
                time.sleep(0.05)  # as long as learning takes; then there is always a message
        assert time.perf_counter() - began < 5


def test_close_waits_for_workers_that_are_done_but_not_for_ever(tmp_path):
    soon, never = tmp_path / "soon", tmp_path / "never"
    with closing(WorkerPool(troubled.finishing, [(str(never), 1e6), (str(soon), 1.0)], 4.0)) as workers:
        while workers.at_work:
            assert workers.receive() == []
        assert not soon.exists()
        began = time.monotonic()
    assert soon.exists() and 4.0 <= time.monotonic() - began < 30.0
    assert not any(process.is_alive() for process in workers.processes)
    with closing(WorkerPool(troubled.finishing, [(str(never), 1e6)], 60.0)) as workers:
        while workers.at_work:
            workers.receive()
        began = time.monotonic()
        workers.close(wait_for_done=False)
        assert time.monotonic() - began < 20.0 and not workers.processes[0].is_alive()


def test_reply_resets_the_timeout_of_a_worker_that_had_to_wait():
    with closing(WorkerPool(troubled.patience, [()], 60.0)) as workers:
        workers.await_all()
        assert workers.receive() == []
        workers.waited[0] = 59.9  # seconds in which it was given nothing to do
        workers.reply([0], "go on")
        assert workers.await_all() == ["another"]  # for which it works longer than the tenth that was left


def test_receive_does_not_count_the_time_in_which_the_run_was_suspended_or_busy():
    with closing(WorkerPool(troubled.patience, [()], 60.0)) as workers:
        workers.await_all()
        workers.received_at -= 3600.0
        assert workers.receive() == []


def test_pool_raises_worker_error_where_a_worker_cannot_start():
    with pytest.raises(WorkerError, match="a worker failed"):
        WorkerPool(troubled.two_words, [(lambda: None, 1)], 1.0)  # a lambda cannot be pickled


def test_a_worker_can_be_given_as_many_shared_tensors_as_are_allowed_and_no_more():
    tensors = [torch.zeros(1) for _ in range(MOST_SHARED)]
    move_to_shared_memory(tensors)
    with closing(WorkerPool(troubled.check_shared, [(MOST_SHARED, tensors)], 60.0)) as pool:
        assert pool.await_all() == [True]
    with pytest.raises(ValueError, match=r"must share at most 248 tensors .*, got 249: use fewer workers"):
        move_to_shared_memory([*tensors, torch.zeros(1)])


def test_move_to_shared_memory_raises_worker_error_where_none_is_left():
    class Full:
        def share_memory_(self):
            raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")

    with pytest.raises(WorkerError, match=r"no shared memory for the workers: unable to write .* No space left"):
        move_to_shared_memory([Full()])

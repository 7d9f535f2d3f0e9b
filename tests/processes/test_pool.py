"""Worker processes: whatever becomes of one, the run does not wait for it."""

import time
from contextlib import closing

import psutil
import pytest
import troubled

from a2c.processes import pool as workers
from a2c.processes.errors import WorkerError
from a2c.processes.pool import WorkerPool


def test_messages_come_in_order_with_the_worker_s_number_until_all_have_done_their_part():
    heard = {0: [], 1: []}
    with closing(WorkerPool(troubled.two_words, [("a", "b"), ("c", [1, 2])], 5.0)) as staff:
        while staff.at_work:
            for number, message in staff.receive():
                heard[number].append(message)
    assert heard == {0: ["a", "b"], 1: ["c", [1, 2]]}


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (troubled.half_a_message, "a worker gave no answer within 1 seconds"),
        (troubled.silence, "a worker gave no answer within 1 seconds"),
        (troubled.death, "the process of a worker died"),
        (troubled.mistake, "a worker failed: KeyError: 'nothing there'"),
    ],
)
def test_trouble_ends_the_wait(work, said, monkeypatch):
    monkeypatch.setattr(workers, "START_TIMEOUT", 0.0)
    with closing(WorkerPool(work, [(), ()], 1.0)) as staff:
        for silent in staff.silent:  # only the start may take longer
            staff.silent[silent] = -20.0 if work is not troubled.silence else 0.0
        began = time.perf_counter()
        with pytest.raises(WorkerError, match=said) as raised:
            while staff.at_work:
                staff.receive()
        assert time.perf_counter() - began < 20
        if work is troubled.mistake:
            assert 'raise KeyError("nothing there")' in raised.value.trace
    assert not any(psutil.pid_exists(process.pid) for process in staff.processes)


def test_the_first_messages_of_all_are_awaited():
    with closing(WorkerPool(troubled.two_words, [(n, 10 + n) for n in range(3)], 5.0)) as staff:
        assert sorted(staff.await_all())[:3] == [0, 1, 2]


def test_a_silent_worker_is_noticed_while_another_keeps_the_trainer_busy(monkeypatch):
    with closing(WorkerPool(troubled.chatter_or_silence, [(True,), (False,)], 1.0)) as staff:
        staff.await_all()
        began = time.perf_counter()
        with pytest.raises(WorkerError, match="gave no answer within 1 seconds"):
            while time.perf_counter() - began < 20:
                staff.receive()
                time.sleep(0.05)  # learning: there is always a message when it is done
        assert time.perf_counter() - began < 5


def test_a_worker_that_was_made_to_wait_has_not_been_silent():
    with closing(WorkerPool(troubled.patience, [()], 2.0)) as staff:
        staff.await_all()
        end = time.perf_counter() + 1.2
        while time.perf_counter() < end:
            assert staff.receive() == []
        staff.let_go_on([0])
        assert staff.await_all() == ["another"]  # 2.6 seconds behind the first, 1.4 of them its own


def test_a_worker_that_cannot_start_is_a_worker_error(monkeypatch):
    with pytest.raises(WorkerError, match="a worker failed"):
        WorkerPool(troubled.two_words, [(lambda: None, 1)], 1.0)  # cannot be sent


def test_no_shared_memory_is_a_worker_error():
    class Full:
        def share_memory_(self):
            raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")

    with pytest.raises(WorkerError, match=r"no shared memory for the workers: unable to write .* No space left"):
        workers.share([Full()])

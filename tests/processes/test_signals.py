"""How signals ask a run to stop."""

import signal
import threading
from types import SimpleNamespace

from a2c.processes import signals
from a2c.processes.signals import StopRequest, stop_on_signals


def test_stop_request_records_the_first_signal():
    request = StopRequest()
    assert not request
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        request.handle(number, None)
        assert request and request.name == "SIGTERM"


def test_stop_request_interrupts_at_a_second_sigint_and_then_not_for_two_seconds(monkeypatch):
    clock, request, interrupted = [0.0], StopRequest(), []
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for seconds in (10.0, 10.1, 10.2, 12.0, 12.2, 14.1, 14.3):
        clock[0] = seconds
        try:
            request.handle(signal.SIGINT, None)
        except KeyboardInterrupt:
            interrupted.append(seconds)
    assert interrupted == [10.1, 12.2, 14.3] and request.name == "SIGINT"


def test_stop_on_signals_changes_nothing_outside_the_main_thread():
    before, within = [signal.getsignal(number) for number in signals.SIGNALS], []

    def enter():
        with stop_on_signals(StopRequest()):
            within.append([signal.getsignal(number) for number in signals.SIGNALS])

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert within == [before]

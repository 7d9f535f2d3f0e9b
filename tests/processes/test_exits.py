"""How processes end: exit codes, output that cannot be written, SIGTERM."""

import os
import signal
import subprocess
import sys

import pytest
from disks import FULL

from a2c.processes.exits import exit_on_sigterm


def test_exit_with_ends_a_process_without_standard_output_by_its_code():
    code = "import sys; from a2c.processes.exits import exit_with; sys.stdout = None; exit_with(7, at_once=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.parametrize("output", ["full", "closed"])
def test_output_that_cannot_be_written_is_dropped_once_it_was_said(output):
    code = "from a2c.processes.exits import *\nprint('x')\ntry: flush_output()\nexcept OSError: raise SystemExit(7)"
    if output == "full":
        stdout = os.open(FULL, os.O_WRONLY)
    else:
        read, stdout = os.pipe()
        os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(stdout)
    assert (done.returncode, done.stderr) == (7, "")


def test_sigterm_ends_the_process_by_system_exit_and_is_what_it_was_after():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, exit_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) == before


HANGS = """
import threading, time
from a2c.processes.exits import exit_on_sigterm

with exit_on_sigterm():
    thread = threading.Thread(target=time.sleep, args=(600,), name="a2c-compute_0")
    thread.start()
    print("begun", flush=True)
    thread.join()
"""


def test_sigterm_ends_a_process_whose_environment_hangs():
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        try:
            assert process.wait(60) == 143
        finally:
            process.kill()

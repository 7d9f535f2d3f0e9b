"""How a command ends its process."""

import subprocess
import sys


def test_leave_ends_a_process_without_standard_output_by_its_code():
    code = "import sys; from a2c.processes.signals import exit_with; sys.stdout = None; exit_with(7, at_once=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")

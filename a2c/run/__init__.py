"""The life of one run: its directory, checkpoints, outputs, recovery, trainer."""

import sys

if sys.platform == "win32":  # no flock, no fsync of a directory; a signal there ends a process at once
    raise OSError("this part of a2c needs Linux, got Windows; install and use a2c in WSL")

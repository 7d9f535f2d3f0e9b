"""The life of one run: its directory, checkpoints, outputs, recovery, trainer."""

"""A disk that refuses to write while a test says so."""

FULL = "/dev/full"  # every write to it fails with ENOSPC


class Disk:
    """`open` of a disk that refuses every write below `root` while `full` is true; files can still be truncated."""

    def __init__(self, root):
        self.root, self.full, self.real = str(root), False, open

    def open(self, file, mode="r", *args, **kwargs):
        full = self.full and str(file).startswith(self.root) and set(mode) & set("wax")
        return self.real(FULL, "wb", buffering=0) if full else self.real(file, mode, *args, **kwargs)

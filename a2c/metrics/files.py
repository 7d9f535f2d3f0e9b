"""Files that are whole at every instant, and tables that a refusing disk does not break.

A run directory may come from somebody else: nothing here is written through a link that lies in it.
"""

from __future__ import annotations

import csv
import io
import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

TEMPORARY = ".tmp"  # ending of a file that is not whole yet
BLOCK = 1 << 16  # bytes of a table that are looked at together
SMALL = 1 << 20  # bytes that a file of settings may have


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Fill `path` so that a reader sees the old file or the new one, never half of one.

    A link at `path` is replaced, not followed. OSError where the disk refuses; the old file is untouched then.
    """
    _write_atomically(path, [content])


def _write_atomically(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.unlink(missing_ok=True)  # left by a process that was killed, or a link that somebody put there
    try:
        with open(temporary, "xb") as file:  # O_EXCL: never through a link
            file.writelines(blocks)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_small(path: Path) -> str:
    """The text of a file of at most `SMALL` bytes.

    ValueError where it is larger, no UTF-8, or no regular file (a pipe, a device); other OSErrors where it cannot be
    read.
    """
    with open(path, "rb", opener=open_regular) as file:
        content = file.read(SMALL + 1)
    if len(content) > SMALL:
        raise ValueError(f"{path} must have at most {SMALL:,} bytes, got more")
    return content.decode("utf-8")


def open_regular(path: str, flags: int) -> int:
    """An opener for `open` that neither waits for a pipe nor reads a device: both OSError and ValueError there."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise io.UnsupportedOperation(f"{path} must be a regular file")
    return descriptor


def exact(value: float) -> str:
    """A number as text that reads back as the same number; whole ones without a point."""
    whole = float(value).is_integer() and abs(value) < 2**53
    return str(int(value)) if whole else repr(float(value))


class CsvTable:
    """A CSV file that grows by rows of numbers. Rows that could not be written wait for the next call.

    The first column is env_steps and never falls. Rows are added and cut off at the end, in place; what stands
    before is neither read nor written again.
    """

    def __init__(self, path: Path, columns: Sequence[str], keep_until: int | None = None) -> None:
        """`keep_until`: go on with the file, without the rows after these env_steps; None: begin it anew."""
        self.path, self.columns = path, tuple(columns)
        self.header = _csv_text([self.columns])
        self.waiting: list[Sequence[object]] = []
        self.drop_after: int | None = None  # rows after these env_steps are still in the file
        self.rewind(-1 if keep_until is None else keep_until)
        self._drop()

    def rewind(self, env_steps: int) -> None:
        """Drop the rows after `env_steps`; in the file, that is done before the next row is written."""
        self.waiting = [row for row in self.waiting if int(str(row[0])) <= env_steps]
        self.drop_after = env_steps if self.drop_after is None else min(self.drop_after, env_steps)

    def add(self, rows: Sequence[Sequence[object]]) -> None:
        """Append rows; OSError where the disk refuses, and then they are kept."""
        self.waiting += rows
        if self.drop_after is not None:
            self._drop()
        if not self.waiting:
            return
        with open(self.path, "ab", buffering=0, opener=_no_links) as file:
            size = file.tell()
            content = (b"" if size else self.header) + _csv_text(self.waiting)  # somebody may have removed the file
            try:
                while content:  # a nearly full disk takes a part
                    content = content[file.write(content) :]
            except OSError:
                with suppress(OSError):
                    file.truncate(size)
                raise
        self.waiting = []

    def _drop(self) -> None:
        begun = False
        if self.drop_after is not None and self.drop_after >= 0 and self.path.exists():
            with open(self.path, "r+b", buffering=0, opener=_no_links) as file:
                head = file.read(len(self.header))
                start = head.find(b"\n") + 1
                begun = head[:start].split() == self.header.split()  # an editor may have changed the line ends
                if begun:
                    end = self._end_of_rows(file, start, self.drop_after)
                    if os.fstat(file.fileno()).st_nlink == 1:
                        file.truncate(end)
                    else:  # its other name keeps what it has
                        _write_atomically(self.path, _blocks(file, end))
            if not begun:  # somebody else's table
                _set_aside(self.path)
        if not begun:
            write_atomically(self.path, self.header)
        self.drop_after = None

    def _end_of_rows(self, file: io.FileIO, start: int, env_steps: int) -> int:
        """Offset after the last row up to `env_steps`; read from the end of the file, no further than needed."""
        end, rest = file.seek(0, os.SEEK_END), b""
        while end > start:
            begin = max(start, end - BLOCK)
            file.seek(begin)
            block = file.read(end - begin) + rest
            newline = block.rfind(b"\n")
            while newline >= 0:
                previous = block.rfind(b"\n", 0, newline)
                if previous < 0 and begin > start:
                    break  # this line begins in the block before
                cells = self._cells(block[previous + 1 : newline])
                if cells and cells[0] <= env_steps:
                    return begin + newline + 1
                newline = previous
            rest = block[: newline + 1] or block
            if len(rest) > BLOCK:
                rest = b"?"  # no row of ours is that long
            end = begin
        return start

    def _cells(self, line: bytes) -> list[float]:
        """The numbers of a row; none where it is not one of ours."""
        cells = _numbers(line.decode("ascii", "replace"))
        return cells if len(cells) == len(self.columns) and math.isfinite(cells[0]) else []


def read_table(path: Path, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """The named columns of a CSV file as float64 arrays `[rows]`.

    An empty cell is NaN. Rows with a cell that is not a number are left out, and so is an incomplete last line.
    ValueError where a column is missing or the file is a pipe or device. However long a line, memory is bounded by
    the rows.
    """
    parts = [np.empty((0, len(columns)))]
    with open(path, newline="\n", encoding="ascii", errors="replace", opener=open_regular) as file:
        names = file.readline(BLOCK).strip().split(",")
        missing = [name for name in columns if name not in names]
        if missing:
            raise ValueError(f"{path} must have the columns {', '.join(columns)}, got none called {missing[0]}")
        places = [names.index(name) for name in columns]
        rest = ""
        while block := file.read(16 * BLOCK):
            *lines, rest = (rest + block).split("\n")
            if lines:
                parts.append(_parse(lines, len(names))[:, places])
            if len(rest) > BLOCK:
                rest = "?"  # no row of ours is that long
    return dict(zip(columns, np.concatenate(parts).T, strict=True))


def _parse(lines: Sequence[str], width: int) -> np.ndarray:
    """The rows `[rows, width]` among `lines`."""
    with suppress(ValueError):
        rows = np.loadtxt(lines, delimiter=",", comments=None, ndmin=2)
        if rows.shape == (len(lines), width):
            return rows
    return np.array([cells for line in lines if len(cells := _numbers(line)) == width]).reshape(-1, width)


def _numbers(line: str) -> list[float]:
    """The cells of a line, an empty one as NaN; an empty list where a cell is not a number."""
    try:
        return [float(cell) if cell else math.nan for cell in line.rstrip("\r\n").split(",")]
    except ValueError:
        return []


def _no_links(path: str, flags: int) -> int:
    """An opener for files that are written in place: a link, pipe or device there is an OSError."""
    return open_regular(path, flags | getattr(os, "O_NOFOLLOW", 0))


def _blocks(file: io.FileIO, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, in parts."""
    file.seek(0)
    while size > 0 and (block := file.read(min(size, BLOCK))):
        size -= len(block)
        yield block


def _set_aside(path: Path) -> None:
    """Rename a file to `.old`, or `.old2` and so on where that is taken."""
    old, number = path.with_name(f"{path.name}.old"), 1
    while os.path.lexists(old):
        number += 1
        old = path.with_name(f"{path.name}.old{number}")
    os.rename(path, old)


def _csv_text(rows: Sequence[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()

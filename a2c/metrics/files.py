"""Files that are written atomically, and CSV tables that survive a full disk.

A run directory may come from somebody else: nothing is written through a link in it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

TEMPORARY = ".tmp"  # suffix of a file that is not complete yet
BLOCK = 1 << 16  # bytes of a table that are read at once
SMALL = 1 << 20  # largest size of a settings file in bytes


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write `path` so that a reader sees the old file or the new one, never a part of one.

    A link at `path` is replaced, not followed. OSError if the disk refuses; the old file is untouched then.
    """
    _write_atomically(path, [content])


def _write_atomically(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.unlink(missing_ok=True)  # of a process that was killed, or a link
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

    ValueError if it is larger, not UTF-8, or not a regular file (a pipe, a device); OSError if it cannot be read.
    """
    with open(path, "rb", opener=open_regular) as file:
        content = file.read(SMALL + 1)
    if len(content) > SMALL:
        raise ValueError(f"{path} must have at most {SMALL:,} bytes, got more")
    return content.decode("utf-8")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run; empty if there is no file, ValueError if it is damaged."""
    try:
        values: Any = json.loads(read_small(path))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON object, got a damaged file ({error}); remove it") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(values).__name__}; remove it")
    return values


def open_regular(path: str, flags: int) -> int:
    """An opener for `open` that refuses pipes and devices with an error that is both OSError and ValueError."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise io.UnsupportedOperation(f"{path} must be a regular file")
    return descriptor


class CsvTable:
    """A CSV file to which rows of numbers are appended. Rows that could not be written wait for the next call.

    The first column is env_steps, in rising order. Rows are added and cut off at the end, in place unless the file has
    other hard links.
    """

    def __init__(self, path: Path, columns: Sequence[str], keep_until: int | None = None) -> None:
        """`keep_until`: append to the file, without its rows after these env_steps; None: start a new file."""
        self.path, self.columns = path, tuple(columns)
        self.header = _csv_text([self.columns])
        self.waiting: list[Sequence[object]] = []
        self.cut = math.inf  # after an error: size of the file before the rows that wait, some of which it may hold
        self.drop_after: int | None = None  # rows after these env_steps are still in the file
        self.rewind(-1 if keep_until is None else keep_until)
        self._drop()

    def rewind(self, env_steps: int) -> None:
        """Drop the rows after `env_steps`; in the file, that is done before the next row is written."""
        self.waiting = [row for row in self.waiting if int(str(row[0])) <= env_steps]
        self.drop_after = env_steps if self.drop_after is None else min(self.drop_after, env_steps)

    def add(self, rows: Sequence[Sequence[object]]) -> None:
        """Let rows wait for the next `write`."""
        self.waiting += rows

    def write(self) -> None:
        """Append the rows that wait to the file; where the disk refuses, OSError, and they wait for the next call."""
        if self.drop_after is not None:
            self._drop()
        if not self.waiting:
            return
        with open(self.path, "ab", buffering=0, opener=_no_links) as file:
            size = file.truncate(int(self.cut)) if self.cut < file.tell() else file.tell()
            content = (b"" if size else self.header) + _csv_text(self.waiting)  # it may have been removed
            try:
                while content:  # a nearly full disk may take only a part
                    content, self.cut = content[file.write(content) :], size
            except BaseException:  # a second Ctrl-C, too: the rows still wait
                with suppress(OSError):
                    file.truncate(size)
                raise
        self.waiting, self.cut = [], math.inf

    def sync(self) -> None:
        """Make what is in the file survive a power failure; OSError if the disk refuses."""
        with suppress(FileNotFoundError), open(self.path, "r+b", buffering=0, opener=_no_links) as file:
            os.fsync(file.fileno())

    def _drop(self) -> None:
        usable = False
        if self.drop_after is not None and self.drop_after >= 0 and self.path.exists():
            with open(self.path, "r+b", buffering=0, opener=_no_links) as file:
                head = file.read(len(self.header))
                start = head.find(b"\n") + 1
                usable = head[:start].split() == self.header.split()  # an editor may have changed the line endings
                if usable:
                    end = self._end_of_rows(file, start, self.drop_after)
                    if os.fstat(file.fileno()).st_nlink == 1:
                        file.truncate(end)
                    else:  # the file under its other name stays as it is
                        _write_atomically(self.path, _blocks(file, end))
            if not usable:  # another kind of table
                _set_aside(self.path)
        if not usable:
            write_atomically(self.path, self.header)
            self.cut = math.inf
        self.drop_after = None

    def _end_of_rows(self, file: io.FileIO, start: int, env_steps: int) -> int:
        """Offset after the last row with at most `env_steps`, searched from the end of the file."""
        end, rest = file.seek(0, os.SEEK_END), b""
        while end > start:
            begin = max(start, end - BLOCK)
            file.seek(begin)
            block = file.read(end - begin) + rest
            newline = block.rfind(b"\n")
            while newline >= 0:
                previous = block.rfind(b"\n", 0, newline)
                if previous < 0 and begin > start:
                    break  # this line starts in the block before
                cells = self._cells(block[previous + 1 : newline])
                if cells and cells[0] <= env_steps:
                    return begin + newline + 1
                newline = previous
            rest = block[: newline + 1] or block
            if len(rest) > BLOCK:
                rest = b"?"  # longer than any row
            end = begin
        return start

    def _cells(self, line: bytes) -> list[float]:
        """The numbers of a row; empty if the line is not a row of this table."""
        cells = _numbers(line.decode("ascii", "replace"))
        return cells if len(cells) == len(self.columns) and math.isfinite(cells[0]) else []


def read_table(path: Path, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """The named columns of a CSV file as float64 arrays `[rows]`.

    An empty cell is NaN. Rows with a cell that is not a number are left out, and so is an incomplete last line.
    ValueError if a column is missing or the file is a pipe or device. Long lines that are no rows take no memory.
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
                rest = "?"  # longer than any row
    return dict(zip(columns, np.concatenate(parts).T, strict=True))


def _parse(lines: Sequence[str], width: int) -> np.ndarray:
    """The rows `[rows, width]` among `lines`."""
    with suppress(ValueError):
        rows = np.loadtxt(lines, delimiter=",", comments=None, ndmin=2)
        if rows.shape == (len(lines), width):
            return rows
    return np.array([cells for line in lines if len(cells := _numbers(line)) == width]).reshape(-1, width)


def _numbers(line: str) -> list[float]:
    """The cells of a line, an empty one as NaN; an empty list if a cell is not a number."""
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

"""Files that are whole at every instant, and tables that a refusing disk does not break."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar


def write_synced(path: Path, content: bytes) -> None:
    """Write `content` and wait until the disk has it; nothing is left behind where that fails."""
    try:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise


def write_atomically(path: Path, content: bytes) -> None:
    """Fill `path` so that a reader sees the old file or the new one, never half of one."""
    temporary = path.with_name(path.name + ".tmp")
    write_synced(temporary, content)
    os.replace(temporary, path)


class CsvTable:
    """A CSV file that grows by rows. Rows that could not be written wait for the next call."""

    def __init__(self, path: Path, columns: Sequence[str], keep_until: int | None = None) -> None:
        """`keep_until`: drop rows whose first column, env_steps, is beyond this number."""
        self.path, self.columns = path, tuple(columns)
        self.waiting: list[Sequence[object]] = []
        self.drop_behind: int | None = None  # rows behind these env_steps are still in the file
        self.rewind(-1 if keep_until is None else keep_until)
        self._drop()

    def rewind(self, env_steps: int) -> None:
        """Drop the rows behind `env_steps`; in the file, that is done before the next row is written."""
        self.waiting = [row for row in self.waiting if int(row[0]) <= env_steps]
        self.drop_behind = env_steps if self.drop_behind is None else min(self.drop_behind, env_steps)

    def add(self, rows: Sequence[Sequence[object]]) -> None:
        """Append rows; OSError where the disk refuses, and then they are kept."""
        self.waiting += rows
        if self.drop_behind is not None:
            self._drop()
        if not self.waiting:
            return
        new = [] if self.path.exists() else [self.columns]  # somebody removed the file
        with open(self.path, "ab", buffering=0) as file:
            size = file.tell()
            content = _csv_text([*new, *self.waiting])
            try:
                while content:  # a nearly full disk takes a part
                    content = content[file.write(content) :]
            except OSError:
                with suppress(OSError):
                    file.truncate(size)
                raise
        self.waiting = []

    def _drop(self) -> None:
        rows: list[list[str]] = []
        if self.drop_behind >= 0 and self.path.exists():
            with open(self.path, newline="", encoding="utf-8", errors="replace") as old, suppress(csv.Error):
                for row in csv.reader(old):
                    if self._is_row(row) and int(row[0]) <= self.drop_behind:
                        rows.append(row)
        write_atomically(self.path, _csv_text([self.columns, *rows]))
        self.drop_behind = None

    def _is_row(self, row: list[str]) -> bool:
        return len(row) == len(self.columns) and row[0].isdigit()


class EventFile:
    """Scalars for TensorBoard, written by the caller's thread, so that a full disk shows as OSError here.

    tensorboardX's SummaryWriter writes from a thread that such an error ends; its queue then fills
    up and blocks the run.
    """

    def __init__(self, directory: Path, first_step: int | None) -> None:
        """`first_step`: TensorBoard forgets points of earlier files from here on (a resumed run)."""
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}.{first_step or 0}")
        if first_step is not None:
            self._writer.write_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        self._writer.flush()

    def add(self, step: int, seconds: float, values: dict[str, float]) -> None:
        """One point per name, at wall time `seconds`; values that are no number are left out."""
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.write_event(Event(step=step, wall_time=seconds, summary=scalar(name, value)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        with suppress(ValueError):  # closed already
            self._writer.close()


def _csv_text(rows: Sequence[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()

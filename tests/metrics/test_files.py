"""Atomic files and CSV tables: on a full disk, with links and pipes in the way, at any length."""

import os
import time
import tracemalloc

import pytest
from disks import Disk
from runs import rows

from a2c.metrics.files import SMALL, CsvTable, read_small, read_table, write_atomically
from a2c.metrics.logger import EventFile
from a2c.metrics.results import read_episodes
from a2c.run.checkpoint import save_checkpoint

COLUMNS = ("env_steps", "seconds", "score", "length")


@pytest.fixture
def disk(tmp_path, monkeypatch):
    disk = Disk(tmp_path)
    monkeypatch.setattr("builtins.open", disk.open)
    return disk


def append(table, rows=()):
    table.add(rows)
    table.write()


def test_csv_table_keeps_rows_while_the_disk_is_full(tmp_path, disk):
    table = CsvTable(tmp_path / "table.csv", ("env_steps", "score"))
    append(table, [(1, 2.0)])
    disk.full = True
    for env_steps in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            append(table, [(env_steps, 4.0)])
    disk.full = False
    append(table, [(4, 5.0)])
    assert [row["env_steps"] for row in rows(tmp_path / "table.csv")] == ["1", "2", "3", "4"]


def test_csv_table_has_no_half_row_on_a_nearly_full_disk(tmp_path, monkeypatch):
    table = CsvTable(tmp_path / "table.csv", ("env_steps", "score"))
    append(table, [(1, 2.0)])
    real = open

    class Nearly:
        """A file that takes three bytes and then no more."""

        def __init__(self, *args, **kwargs):
            self.file, self.room = real(*args, **kwargs), 3

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, content):
            if not self.room:
                raise OSError(28, "No space left on device")
            self.room = 0
            return self.file.write(content[:3])

    monkeypatch.setattr("builtins.open", Nearly)
    with pytest.raises(OSError, match="No space left"):
        append(table, [(222, 3.0)])
    monkeypatch.undo()
    assert (tmp_path / "table.csv").read_text().split() == ["env_steps,score", "1,2.0"]
    append(table, [])
    assert (tmp_path / "table.csv").read_text().split() == ["env_steps,score", "1,2.0", "222,3.0"]


@pytest.mark.parametrize("rewound", [False, True])
@pytest.mark.parametrize("refused", ["close", "truncate"])
def test_csv_table_doubles_no_row_where_the_error_comes_late(refused, rewound, tmp_path, monkeypatch):
    table = CsvTable(tmp_path / "table.csv", ("env_steps", "score"))
    append(table, [(1, 2.0)])
    real = open

    class Late:
        """A file that takes all rows; then `close` fails, or a second write does, and the rows cannot be cut off."""

        def __init__(self, *args, **kwargs):
            self.file, self.written = real(*args, **kwargs), False

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()
            if refused == "close":
                raise OSError(122, "Disk quota exceeded")

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, content):
            if self.written:
                raise OSError(122, "Disk quota exceeded")
            self.written = refused == "truncate"
            return self.file.write(content[:9] if self.written else content)

        def truncate(self, size):
            raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr("builtins.open", Late)
    with pytest.raises(OSError, match="quota"):
        append(table, [(22, 3.0), (33, 4.0)])
    monkeypatch.undo()
    if rewound:
        table.rewind(22)
        append(table, [(33, 5.0)])
    else:
        append(table)
    last = "33,5.0" if rewound else "33,4.0"
    assert (tmp_path / "table.csv").read_text().split() == ["env_steps,score", "1,2.0", "22,3.0", last]


def test_csv_table_that_is_rewound_on_a_full_disk_doubles_no_row(tmp_path, disk):
    table = CsvTable(tmp_path / "table.csv", ("env_steps", "score"))
    append(table, [(1, 1.0), (2, 1.0), (3, 1.0)])
    disk.full = True
    table.rewind(1)
    with pytest.raises(OSError, match="No space left"):
        append(table, [(2, 2.0)])
    table.rewind(1)  # and once more before the disk has room
    disk.full = False
    append(table, [(2, 3.0)])
    assert (tmp_path / "table.csv").read_text().split() == ["env_steps,score", "1,1.0", "2,3.0"]


def test_write_atomically_follows_no_link(tmp_path):
    (tmp_path / "precious").write_text("precious")
    for name in ("file", "file.tmp", "latest.pt", "latest.pt.tmp", "previous.pt", "previous.pt.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    write_atomically(tmp_path / "file", b"content")
    for _ in range(2):
        save_checkpoint(tmp_path / "latest.pt", {"env_steps": 1}, keep_previous=True)
    assert (tmp_path / "precious").read_text() == "precious" and (tmp_path / "file").read_bytes() == b"content"
    assert not any((tmp_path / name).is_symlink() for name in ("file", "latest.pt", "previous.pt"))


def test_csv_table_and_event_file_follow_no_link_that_appears_later(tmp_path):
    table = CsvTable(tmp_path / "table.csv", COLUMNS)
    append(table, [(1, 1.0, 1.0, 1)])
    (tmp_path / "table.csv").rename(tmp_path / "kept.csv")
    (tmp_path / "table.csv").symlink_to(tmp_path / "kept.csv")
    before = (tmp_path / "kept.csv").read_bytes()
    for rewind in (False, True):
        if rewind:
            table.rewind(0)
        with pytest.raises(OSError, match="symbolic"):
            append(table, [(2, 1.0, 1.0, 1)])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tensorboard").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="must not be a link"):
        EventFile(tmp_path / "tensorboard", None)
    assert (tmp_path / "kept.csv").read_bytes() == before and not list((tmp_path / "elsewhere").iterdir())


def test_csv_table_with_two_names_changes_under_one_of_them(tmp_path):
    append(CsvTable(tmp_path / "table.csv", COLUMNS), [(10, 1.0, 5, 6), (30, 1.0, 5, 6)])
    os.link(tmp_path / "table.csv", tmp_path / "other.csv")
    before = (tmp_path / "other.csv").read_bytes()
    table = CsvTable(tmp_path / "table.csv", COLUMNS, keep_until=20)
    append(table, [(40, 1.0, 5, 6)])
    assert [row["env_steps"] for row in rows(tmp_path / "table.csv")] == ["10", "40"]
    assert (tmp_path / "other.csv").read_bytes() == before


def test_csv_table_with_two_names_is_copied_in_blocks(tmp_path):
    end = big_table(tmp_path / "table.csv", 17)
    os.link(tmp_path / "table.csv", tmp_path / "other.csv")
    before = (tmp_path / "table.csv").read_bytes()
    tracemalloc.start()
    CsvTable(tmp_path / "table.csv", COLUMNS, keep_until=end)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6 and (tmp_path / "table.csv").read_bytes() == before
    assert not (tmp_path / "table.csv").samefile(tmp_path / "other.csv")


def test_read_small_refuses_large_files_and_devices(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("ä" * (SMALL // 2), encoding="utf-8")
    assert read_small(path) == "ä" * (SMALL // 2)
    path.write_bytes(b"a" * (SMALL + 1))
    with pytest.raises(ValueError, match=r"config\.json must have at most 1,048,576 bytes"):
        read_small(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"config\.json must be a regular file"):
        read_small(path)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "missing")


def test_read_episodes_does_not_wait_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "episodes.csv")
    with pytest.raises(OSError, match="must be a regular file"):
        read_episodes(tmp_path)


def test_read_episodes_takes_no_memory_for_a_hole_in_the_file(tmp_path):
    path = tmp_path / "episodes.csv"
    append(CsvTable(path, COLUMNS), [(10, 1.0, 5, 6)])
    os.truncate(path, 30_000_000)
    with open(path, "ab") as file:
        file.write(b"\n20,1.0,7,6\r\n")
    tracemalloc.start()
    episodes = read_episodes(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert episodes["score"].tolist() == [5, 7] and peak < 10e6


def test_write_atomically_gives_the_usual_permissions(tmp_path):
    write_atomically(tmp_path / "file", b"content")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~umask


def big_table(path, megabytes=100):
    """A table of that size; its env_steps rise by 10 per row, in the last 500,000 rows at least."""
    first = 10_000_000_000  # all rows are equally long
    block = b"".join(b"%d,123456.78,-21,1234\r\n" % (first - 10_000_000 + 10 * i) for i in range(30_000))
    with open(path, "wb") as file:
        file.write(b"env_steps,seconds,score,length\r\n")
        file.write(block * max(1, megabytes - 16))
        file.write(b"".join(b"%d,123456.78,-21,1234\r\n" % (first + 10 * i) for i in range(500_000)))
    return first + 5_000_000


def test_csv_table_reads_only_the_end_of_a_long_file(tmp_path):
    end = big_table(tmp_path / "episodes.csv")
    size = (tmp_path / "episodes.csv").stat().st_size
    tracemalloc.start()
    began = time.perf_counter()
    table = CsvTable(tmp_path / "episodes.csv", COLUMNS, keep_until=end - 10 - 300_000)
    append(table, [(end, "1.00", "5", 6)])
    seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6 and seconds < 5
    row = len(b"10000000000,123456.78,-21,1234\r\n")
    assert (tmp_path / "episodes.csv").stat().st_size == size - 30_000 * row + len(f"{end},1.00,5,6\r\n")
    with open(tmp_path / "episodes.csv", "rb") as file:
        file.seek(-3 * row, os.SEEK_END)
        last = file.read().split(b"\r\n")[-3:]
    assert last == [b"%d,123456.78,-21,1234" % (end - 300_010), b"%d,1.00,5,6" % end, b""]


def test_read_episodes_takes_little_more_memory_than_its_arrays(tmp_path):
    big_table(tmp_path / "episodes.csv", 10)
    tracemalloc.start()
    episodes = read_episodes(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    numbers = sum(column.nbytes for column in episodes.values())
    assert len(episodes["score"]) > 300_000 and peak < 2.5 * numbers + 8e6


@pytest.mark.parametrize(
    "ending", ["", "12,1.", "12,1.00,5", "12,1.00,5,6", "x,1,2,3\r\n", "12,a,2,3\r\n", "\0" * 300_000]
)
def test_csv_table_drops_incomplete_lines_at_its_end(ending, tmp_path):
    path = tmp_path / "table.csv"
    kept = [(10 * i, "1.50", "nan", 5) for i in range(1, 5001)]  # longer than a block
    append(CsvTable(path, COLUMNS), kept)
    before = path.read_bytes()
    with open(path, "a", newline="", encoding="utf-8") as file:
        file.write(ending)
    CsvTable(path, COLUMNS, keep_until=10**9)
    assert path.read_bytes() == before
    for keep in (49_995, 30_000, 29_999, 10, 9):
        CsvTable(path, COLUMNS, keep_until=keep)
        assert [int(row["env_steps"]) for row in rows(path)] == [step for step, *_ in kept if step <= keep]


def test_csv_table_accepts_other_line_endings(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("env_steps,seconds,score,length\n10,1.0,5,6\n20,1.0,5,6\n")
    append(CsvTable(path, COLUMNS, keep_until=10), [(30, 1.0, 5, 6)])
    assert [row["env_steps"] for row in rows(path)] == ["10", "30"]


def test_csv_table_sets_a_foreign_file_aside_and_read_table_skips_bad_rows(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("#!/bin/sh\nrm -rf /\n")
    CsvTable(path, COLUMNS, keep_until=10)
    assert path.read_bytes() == b"env_steps,seconds,score,length\r\n"
    assert (tmp_path / "table.csv.old").read_text() == "#!/bin/sh\nrm -rf /\n"
    path.write_text("another\n")
    (tmp_path / "table.csv.old2").symlink_to("nowhere")
    CsvTable(path, COLUMNS, keep_until=10)
    assert (tmp_path / "table.csv.old").read_text() == "#!/bin/sh\nrm -rf /\n"
    assert (tmp_path / "table.csv.old3").read_text() == "another\n"
    with open(path, "a", newline="", encoding="utf-8") as file:
        file.write("1,1.0,5,6\r\n2,evil,5,6\r\n3,1.0,5\r\n\r\n4,,nan,6\r\n5,1.0,5,6,7\r\n6,1.0,-inf,9\r\n7,1.0,5,6")
    read = read_table(path, ("env_steps", "score"))
    assert read["env_steps"].tolist() == [1, 4, 6] and str(read["score"].tolist()) == "[5.0, nan, -inf]"
    with pytest.raises(ValueError, match="got none called policy_lag"):
        read_table(path, ("env_steps", "policy_lag"))


def test_write_atomically_syncs_the_whole_content(tmp_path, monkeypatch):
    sizes, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: sizes.append(os.fstat(fd).st_size) or fsync(fd))
    write_atomically(tmp_path / "file", b"content")
    assert sizes == [7]


def test_write_atomically_leaves_no_temporary_file_where_it_fails(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError("Input/output error")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="Input/output"):
        write_atomically(tmp_path / "file", b"content")
    assert not list(tmp_path.iterdir())


def test_csv_table_that_is_rewound_twice_keeps_no_row_after_the_earlier_of_the_two(tmp_path):
    table = CsvTable(tmp_path / "table.csv", ("env_steps", "score"))
    append(table, [(1, 1.0), (2, 1.0), (3, 1.0)])
    table.rewind(1)  # nothing is written before the run goes back again
    table.add([(2, 2.0), (3, 2.0)])
    table.rewind(2)
    append(table, [(3, 3.0)])
    assert [(row["env_steps"], row["score"]) for row in rows(tmp_path / "table.csv")] == [
        ("1", "1.0"),
        ("2", "2.0"),
        ("3", "3.0"),
    ]

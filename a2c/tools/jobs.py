"""The processes of a comparison: several trainings at a time, and after each the evaluation of its kept policies."""

from __future__ import annotations

import json
import math
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from a2c.metrics.console import QuietConsole
from a2c.metrics.files import read_object, write_atomically
from a2c.metrics.text import format_duration
from a2c.processes.signals import StopRequest, stop_on_signals
from a2c.processes.start import module_environ
from a2c.run.checkpoint import LATEST
from a2c.run.run_dir import InUse, RunLock
from a2c.tools.frozen import command
from a2c.tools.read_run import number_in
from a2c.tools.runs import Run
from a2c.tools.summary import row_of, show_score

STATUS = "status.json"  # how the runs have ended
ENDING = 60.0  # seconds that a run may need to end once its comparison has been killed
TERMINAL = ("FORCE_COLOR", "TTY_COMPATIBLE")  # variables that would make rich draw its live panel into a log
FAILED = 1  # exit status of a run whose process could not be started, or whose tables cannot be read


class Lines:
    """A line where a run begins or ends; on a terminal also a bar of how many have ended."""

    def __init__(self, total: int, ended: int) -> None:
        self.console = QuietConsole(highlight=False)
        columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]} running"))
        self.bar = Progress(
            *(*columns, TimeElapsedColumn()),
            console=self.console,
            auto_refresh=False,
            transient=True,
            disable=not self.console.is_terminal or self.console.is_dumb_terminal,
        )
        self.task = self.bar.add_task("", total=total, completed=ended, now=0)

    def __enter__(self) -> Lines:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with suppress(OSError):
            self.bar.stop()

    def show(self, ended: int, running: int) -> None:
        """Show how many runs have ended."""
        with suppress(OSError):
            self.bar.update(self.task, completed=ended, now=running, refresh=True)

    def print(self, text: str) -> None:
        """Print one line above the bar, without a line break."""
        print_line(text, self.console)


def print_line(text: str, console: QuietConsole | None = None) -> None:
    """Print one line; nothing happens where nobody reads it, and the runs go on."""
    (console or QuietConsole(highlight=False)).print(text, soft_wrap=True, markup=False, emoji=False)


class Jobs:
    """Trains the runs of a comparison in `out`, each in a process of its own.

    `train` is the command that starts a training, given flags. `codes` holds the exit status of every run that has
    ended, by its name: 0 once it is trained and its kept policies are evaluated.
    """

    def __init__(self, out: Path, train: Sequence[str], deadline: float = math.inf) -> None:
        """`deadline`: when, by `time.monotonic`, all runs are stopped as by a signal."""
        self.out, self.train, self.deadline = out, list(train), deadline
        self.request = StopRequest()
        self.ended = self._read()
        self.codes: dict[str, int] = {}
        self.running: set[subprocess.Popen[bytes]] = set()
        self.lock = threading.Lock()  # of what the threads share

    def is_finished(self, run: Run) -> bool:
        """Whether a run needs no process any more: it has ended without an error, where it shall stop or later."""
        stopped, stop = self.recorded(run, "stop_after"), run.config.stop_after  # 0: at its end
        far_enough = stopped is not None and (stopped == 0 or 0 < stop <= stopped)
        return self.recorded(run, "exit_status") == 0 and far_enough and (self.out / run.name / LATEST).exists()

    def recorded(self, run: Run, name: str) -> float | None:
        """The number `name` in the status of a run that has ended; None where there is none."""
        status: object = self.ended.get(run.name)
        return number_in(status, name) if isinstance(status, dict) else None

    @property
    def out_of_time(self) -> bool:
        """Whether the deadline has stopped the runs."""
        return self.request.number == signal.SIGALRM

    def train_all(self, runs: Sequence[Run], jobs: int) -> None:
        """Train all `runs`, `jobs` at a time, until the first signal, which is passed on to them as SIGTERM.

        A run that `out` holds already is resumed; one that fails leaves the others alone. A second SIGINT ends all
        runs at once, with KeyboardInterrupt.
        """
        missing = [run for run in runs if not self.is_finished(run)]
        self.codes = {run.name: 0 for run in runs if run not in missing}
        with (
            stop_on_signals(self.request),
            Lines(len(runs), len(self.codes)) as lines,
            ThreadPoolExecutor(jobs) as pool,
        ):
            waiting = {pool.submit(self._job, run, lines) for run in missing}
            try:
                while waiting:
                    done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                    for job in done:
                        job.result()  # raises what the thread raised
                    lines.show(len(self.codes), len(self.running))
                    if time.monotonic() >= self.deadline:
                        self.request.handle(signal.SIGALRM, None)
            except BaseException as error:
                self.request.handle(signal.SIGTERM, None)
                if isinstance(error, KeyboardInterrupt):
                    self._interrupt()
                raise

    def _job(self, run: Run, lines: Lines) -> None:
        """Train one run, evaluate its policies, record how it ended. In a thread of its own."""
        if self.request:
            return
        with self.lock:
            self.ended.pop(run.name, None)  # how it had ended before
        name = f"{run.setting} seed {run.config.seed}"
        lines.print(f"begin  {name}")
        try:
            code = self._train(run)
            result = last_line(self.out / f"{run.name}.log") if code else describe(self.out, run)
        except (OSError, ValueError) as error:  # no process, no log, or no tables
            code, result = FAILED, str(error)
            with suppress(OSError), open(self.out / f"{run.name}.log", "a", encoding="utf-8") as log:
                log.write(f"error: {error}\n")
        if code and self.request:
            lines.print(f"stop   {name}")
            return
        lines.print(f"failed {name} with exit status {code}: {result}" if code else f"end    {name}: {result}")
        with self.lock:
            self.codes[run.name] = code
            self.ended[run.name] = {"exit_status": code, "stop_after": run.config.stop_after}
            try:
                write_atomically(self.out / STATUS, (json.dumps(self.ended, indent=2) + "\n").encode())
            except OSError as error:  # where it is missing, the next comparison asks the run itself
                lines.print(f"{STATUS} could not be written: {error}")

    def _train(self, run: Run) -> int:
        """The exit status of a run: of its training, else of the evaluation of the policies that it has kept."""
        run_dir, target = self.out / run.name, run.config.target_score
        flags = [*run.flags, "--run-dir", str(run_dir)]
        if run_dir.is_dir():
            self._await_lock(run_dir)
            if self.request:
                return 128 + self.request.number
        if (run_dir / LATEST).exists():
            flags = ["--resume", str(run_dir), "--stop-after", str(run.config.stop_after), *run.display_flags]
        code = self._call([*self.train, *flags], f"a2c train {shlex.join(flags)}", run)
        if code or target is None or not run.keeps_policies:
            return code
        if self.request:
            return 128 + self.request.number
        return self._call(command(run_dir, target, run.config.threads), "evaluate the policies that were kept", run)

    def _await_lock(self, run_dir: Path) -> None:
        """Wait while a process of a comparison that was killed still saves the run; after `ENDING` its start fails."""
        lock, end = RunLock(run_dir), time.monotonic() + ENDING
        while time.monotonic() < end and not self.request:
            try:
                lock.take()
            except InUse:
                time.sleep(0.2)
            else:
                lock.release()
                return

    def _call(self, arguments: Sequence[str], title: str, run: Run) -> int:
        """The exit status of a process that writes to the run's log and is asked to stop when this one is."""
        log = self.out / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            file.write(f"--- {title}\n".encode())
            file.flush()
            environ = {name: text for name, text in module_environ().items() if name not in TERMINAL}
            with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environ) as process:
                with self.lock:
                    self.running.add(process)
                try:
                    return self._wait(process)
                finally:
                    with self.lock:
                        self.running.discard(process)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        asked = False
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=0.2)
                return code if code >= 0 else 128 - code
            if self.request and not asked:
                asked = True
                process.terminate()  # Ctrl-C in a terminal has reached it already

    def _interrupt(self) -> None:
        """Send SIGINT to all processes: the second signal that they get."""
        with self.lock:
            for process in self.running:
                process.send_signal(signal.SIGINT)

    def _read(self) -> dict[str, dict[str, int]]:
        return read_object(self.out / STATUS)


def describe(out: Path, run: Run) -> str:
    """The result of a run that has ended well, in a few words."""
    row, target = row_of(out, run, 0), run.config.target_score
    text = f"{row['env_steps']:,} decisions in {format_duration(row['seconds'])}"
    if target is not None:
        text += f", {target:g} {_when(row['steps_to_target'])}"
    if run.keeps_policies:
        text += f", frozen {_when(row['frozen_steps_to_target'])}"
    return f"{text}, best mean {show_score(row['best'])}"


def _when(env_steps: int | str) -> str:
    return f"at {env_steps:,}" if env_steps != "" else "missed"


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""

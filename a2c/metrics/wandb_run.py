"""Weights & Biases: the rows of a run, handed to a process of their own, so that no training waits for a network."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from a2c.config.config import Config
from a2c.config.extras import has_extra
from a2c.metrics.files import read_small, write_atomically

FOLDER = "wandb"  # in the run directory: what wandb writes, and ID
ID = "id"  # file that names the run, so that a resumed one continues it
PROJECT = "a2c"  # unless WANDB_PROJECT names another
PATIENCE = 10.0  # seconds, at most, that the end of a run waits for the process, which then goes on alone
SCRIPT = Path(__file__).with_name("wandb_process.py")


def check_wandb(config: Config) -> None:
    """ValueError if `config` asks for wandb and the package is missing."""
    if config.wandb and not has_extra("wandb"):
        raise ValueError('wandb must be off where it is not installed (pip install "a2c[wandb]"), got True')


class WandbRun:
    """Scalars for wandb. No method waits (but `close`, for a while), and none fails because of wandb."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        """Begin the run whose id `run_dir` holds, or a new one, with the settings of `config`.

        OSError if the disk refuses, or the process cannot be started.
        """
        arguments = {
            "project": os.environ.get("WANDB_PROJECT", PROJECT),
            "name": os.environ.get("WANDB_NAME", run_dir.resolve().name),
            "id": run_id(run_dir),
            "dir": str(run_dir.resolve()),
            "config": json.loads(config.to_json()),
        }
        # In a session of its own, Ctrl-C does not reach it; where this process ends, so does its input.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        self._input, self._output = self._process.stdin, self._process.stdout
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)
        self._waiting = json.dumps(arguments).encode() + b"\n"
        self._told = self._late = b""
        self._send()

    def add(self, step: int, values: dict[str, float]) -> None:
        """Send one number per name; NaN and infinite values are left out."""
        row = [step, {name: value for name, value in values.items() if math.isfinite(value)}]
        self._waiting += json.dumps(row).encode() + b"\n"
        self._send()

    def messages(self) -> list[str]:
        """What there is to tell since the last call: where the run can be seen, or why it cannot."""
        self._read()
        *lines, self._told = (self._told + self._late).split(b"\n")
        self._late = b""
        return [line.decode("utf-8", "replace") for line in lines]

    def close(self) -> None:
        """End the run; the process has PATIENCE to send what waits, then goes on alone. May be called twice."""
        if self._input.closed:
            return
        end = time.monotonic() + PATIENCE
        while self._waiting and time.monotonic() < end:
            self._send()
            time.sleep(0.01)
        with suppress(OSError):
            self._input.close()
        try:
            self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._late = b"wandb: not every row has been sent yet; a process goes on trying for a minute or two\n"
        self._read()
        self._output.close()

    def _read(self) -> None:
        with suppress(OSError, ValueError):  # the latter: it is closed
            while block := self._output.read(1 << 16):
                self._told += block

    def _send(self) -> None:
        """Write what the pipe takes; the rest waits."""
        try:
            while self._waiting and (written := self._input.write(self._waiting)):  # None: the pipe is full
                self._waiting = self._waiting[written:]
        except (OSError, ValueError):  # the process has ended, or the pipe is closed
            self._waiting = b""


def run_id(run_dir: Path) -> str:
    """The id of the wandb run of `run_dir`, made and kept there if it has none; OSError if the disk refuses."""
    path = run_dir / FOLDER / ID
    with suppress(FileNotFoundError, ValueError):
        if re.fullmatch(r"\w{1,64}", name := read_small(path).strip(), re.ASCII):
            return name
    name = secrets.token_hex(4)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, f"{name}\n".encode())
    return name

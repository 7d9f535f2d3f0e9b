"""Evaluations during a run: a process of the lowest priority plays the policies that the run keeps."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from a2c.config.config import Config
from a2c.metrics.files import CsvTable
from a2c.metrics.results import EVALUATION_COLUMNS, read_evaluations
from a2c.processes.start import module_environ

# Everything that the run has to do goes first. The process ends with `close`, or with its input, however the run
# ends; Ctrl-C does not reach it.
CODE = "import os, sys; os.nice(19); from a2c.tools.frozen import follow_main; follow_main(*sys.argv[1:])"
PATIENCE = 2.0  # seconds that `close` gives it to end by itself


class Evaluator:
    """The process that writes evaluations.csv while a run trains, where `eval_every` is set. It only reads policies."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self.run_dir, self.config = run_dir, config
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, env_steps: int) -> None:
        """Start the process, at `env_steps` of the run; later rows are dropped. OSError if it cannot be started."""
        if not self.config.eval_every:
            path = self.run_dir / "evaluations.csv"  # of an earlier session, or of `a2c compare`
            if path.exists():
                CsvTable(path, EVALUATION_COLUMNS, keep_until=env_steps)
            return
        numbers = (self.config.eval_every, self.config.eval_episodes, env_steps)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", CODE, str(self.run_dir), *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=module_environ(),
            process_group=0,  # no session of its own: Linux weighs sessions against each other before their niceness
        )

    def rewind(self, env_steps: int) -> None:
        """Start the process anew at `env_steps`, to which the run goes back; later rows are dropped."""
        if self.config.eval_every:
            self.close()
            self.start(env_steps)

    def metrics(self, env_steps: int) -> dict[str, float]:
        """The mean score of the last policy of at most `env_steps`; empty if there is none, or no file to read."""
        if not self.config.eval_every:
            return {}
        try:
            table = read_evaluations(self.run_dir)
        except (OSError, ValueError):
            return {}
        means = table["mean"][table["env_steps"] <= env_steps]
        return {"eval_score": float(means[-1])} if len(means) else {}

    def messages(self) -> list[str]:
        """What there is to tell: that it has ended by itself."""
        status = self.process.poll() if self.process else None
        return [f"evaluations.csv is incomplete: its process ended with exit status {status}"] if status else []

    def close(self) -> None:
        """End the process, whatever it does. May be called twice."""
        process, self.process = self.process, None
        if process is not None:
            process.terminate()  # it removes its temporary files
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            process.kill()
            process.communicate()  # closes the pipe and waits

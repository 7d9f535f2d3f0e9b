"""A process that sends rows to Weights & Biases: `python -P wandb_process.py`. It imports nothing of a2c.

Standard input has a line of JSON with the arguments of `wandb.init` and one per row, `[step, {name: number}]`; at its
end the run ends. A line on standard output is something to tell the user.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

START_TIMEOUT = 60.0  # seconds, at most, that wandb tries to begin a run
FINISH_TIMEOUT = 60.0  # seconds, at most, that it tries to send the last rows
WITHOUT_LOGIN = ("offline", "dryrun", "disabled")  # values of WANDB_MODE


def send(lines: Iterable[str], tell: Callable[[str], object]) -> None:
    """Send the rows in `lines`; whatever fails is told."""
    rows = iter(lines)
    try:
        run = _begin(json.loads(next(rows)), tell)
        for line in rows:
            step, values = json.loads(line)
            if step >= run.step:  # else a resumed run replays it, and wandb would warn about it
                run.log(values, step=step)
        run.finish()
    except BaseException as error:  # KeyboardInterrupt: the run was stopped on its web page
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        tell(f"wandb: logging has stopped ({reason}); training continues")


def _begin(arguments: dict[str, Any], tell: Callable[[str], object]) -> Any:
    import wandb

    mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
    if mode not in WITHOUT_LOGIN and not wandb.login(prompt=False, verify=False):
        raise ValueError("not logged in: use `wandb login` or WANDB_MODE=offline")
    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=START_TIMEOUT,
        finish_timeout=FINISH_TIMEOUT,
        x_stats_pid=os.getppid(),  # whose use of the machine is measured
    )
    run = wandb.init(resume="allow", settings=settings, **arguments)
    if run.url:
        tell(f"wandb: {run.url}")
    elif run.offline:
        tell(f"wandb: offline; to upload: wandb sync {shlex.quote(str(Path(run.dir).parent))}")
    return run


def main() -> None:
    """Entry point: messages go to standard output, what wandb prints goes nowhere."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())

    def tell(text: str) -> None:
        with suppress(OSError):  # nobody listens any more
            print(text, file=out)

    send(sys.stdin, tell)


if __name__ == "__main__":
    main()

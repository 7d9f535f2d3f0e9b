"""Stands for `a2c train` in a comparison: writes the files of a run at once, then does what `--do` says.

`end` (exit code 0), `no rows` (exit code 0, an empty table), `fail` (low scores, exit code 1 with a line), `fail once`,
`killed` (by SIGKILL), `meet` (exit code 0 once two runs of the setting have begun), `wait` (exit at SIGTERM), `finish`
(exit code 0 soon after SIGTERM), `stubborn` (exit at SIGINT only). `--resume` ends at once.
"""

import os
import signal
import sys
import time
from pathlib import Path


def main(args):
    given = dict(zip(args[::2], args[1::2], strict=True))
    run_dir, todo = Path(given.get("--run-dir") or given["--resume"]), given.get("--do", "end")
    failed_before = run_dir.exists()
    run_dir.mkdir(exist_ok=True)
    fails = todo == "fail" or (todo == "fail once" and not failed_before)
    write(run_dir, 100 if fails else 500)
    if todo == "no rows":
        (run_dir / "metrics.csv").write_text("env_steps,seconds,updates,policy_lag\n")
    with open(run_dir / "times.txt", "a") as file:
        print(time.monotonic(), file=file, flush=True)
        if todo == "wait":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        elif todo == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
        elif todo == "finish":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        elif todo == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fails:
            sys.exit("error: it is broken")
        (run_dir / "latest.pt").touch()  # from now on it can be stopped
        while todo == "meet" and len(list(run_dir.parent.glob("*/times.txt"))) < 2:
            time.sleep(0.01)
        time.sleep({"wait": 60, "finish": 60, "stubborn": 60, "meet": 0.3}.get(todo, 0))
        print(time.monotonic(), file=file)


def write(run_dir, score, episodes=120):
    """The tables of a run with episodes of `score` points each, 10 decisions and half a second apart."""
    rows = [f"{10 * i},{i / 2},{score},10\n" for i in range(1, episodes + 1)]
    (run_dir / "episodes.csv").write_text("env_steps,seconds,score,length\n" + "".join(rows))
    (run_dir / "metrics.csv").write_text("env_steps,seconds,updates,policy_lag\n1200,60,600,1.5\n")


if __name__ == "__main__":
    main(sys.argv[1:])

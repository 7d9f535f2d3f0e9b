"""What the operating system allows this process: cores, open files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

MORE_FILES = 64  # that a run may open besides those of its workers


def available_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity mask, limited by the quotas of its control groups (Linux, v1, v2).

    `root` is the directory of `proc` and `sys`.
    """
    count = getattr(os, "process_cpu_count", os.cpu_count)  # respects PYTHON_CPU_COUNT and the affinity (Python 3.13)
    cores = count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return max(1, min([cores, *(round(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Cores that each control group of this process allows, where it sets a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        # In a container its own group may be the root of the mount, although its name is the one on the host.
        for folder in {mount, *(mount / parent for parent in _ancestors(group))}:
            try:
                if controllers:
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if int(quota) > 0:  # -1: no limit
                    yield int(quota) / int(period)
            except (OSError, ValueError, ZeroDivisionError):  # no such file, or the quota is "max"
                continue


def _ancestors(group: str) -> list[str]:
    parts = [part for part in group.split("/") if part not in ("", "..")]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def allow_open_files(more: int, rule: str, instead: str) -> None:
    """Raise the soft limit of open files, which workers inherit, until `more` of them can be opened.

    ValueError if the system allows fewer; its text begins with `rule` and ends with what to use `instead`.
    """
    if sys.platform == "win32":
        return
    import resource

    need = len(os.listdir("/dev/fd")) + more + MORE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and need > hard:
        limit = f"{need:,} open files are needed, {hard:,} are allowed (ulimit -Hn)"
        raise ValueError(f"{rule}: {limit}; use {instead}")
    if soft != resource.RLIM_INFINITY and need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))

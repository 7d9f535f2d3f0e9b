"""What a result depends on: command, commit, processor, versions. Runs and comparisons keep it in about.json."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from a2c import __version__
from a2c.compute.compute import Compute, resolve_precision
from a2c.metrics.files import read_object, write_atomically
from a2c.processes.limits import available_cores

PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "stable-baselines3")


def machine_facts(gpu: bool = True) -> dict[str, Any]:
    """What a figure depends on: processor, instruction set that torch uses, cores, GPU, versions, commit.

    `gpu`: ask for its name, where there is one, which starts CUDA in this process.
    """
    processor = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):  # Linux only, and not on every architecture
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    facts: dict[str, Any] = {
        "processor": processor,
        "instructions": _instructions(),
        "cores": available_cores(),
        "gpu": torch.cuda.get_device_name() if gpu and torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts | {"torch threads": torch.get_num_threads(), "commit": _commit()}


def _instructions() -> str:
    """The instruction set of torch's kernels, and whether bfloat16 is native, which decides the default precision."""
    bfloat16 = resolve_precision("auto", torch.device("cpu")) == torch.bfloat16
    return torch.backends.cpu.get_cpu_capability() + (" with bfloat16" if bfloat16 else "")


def _commit() -> str | None:
    """Short hash of the checked-out commit, with a plus if tracked files differ from it; None outside of git."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # leave the index to the user's own git
        done = subprocess.run(["git", *args], cwd=here, env=environ, capture_output=True, timeout=10, check=True)
        return done.stdout.decode().strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # a package in .venv is none of the files around it
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def comparison_facts(command: str, jobs: int) -> dict[str, Any]:
    """What the runs of a comparison depend on, with the command line that made them."""
    return _facts(command, {"jobs": jobs})


def run_facts(compute: Compute) -> dict[str, Any]:
    """What a run depends on besides its settings: the command line of this process, and what `auto` and 0 stand for."""
    program, *args = sys.argv or [""]
    started = {"-c": ["python", "-c", "..."], "__main__.py": ["python", "-m", Path(program).parent.name]}
    name = Path(program).name
    more = {"device": str(compute.device), "precision": compute.precision_name, "threads": compute.threads}
    more |= {"cuda_graphs": compute.cuda_graphs, "ranks": compute.ranks.size}
    return _facts(shlex.join([*started.get(name, [name]), *args]), more, gpu=compute.device.type == "cuda")


def _facts(command: str, more: Mapping[str, Any], gpu: bool = True) -> dict[str, Any]:
    facts = name_instructions(machine_facts(gpu))
    names = ("processor", "cores", "gpu", "python", "torch", "numpy", "gymnasium", "ale-py")
    kept = {name: facts.get(name) for name in names}
    return {"command": command, "commit": facts["commit"], "a2c": __version__, **more, **kept}


def name_instructions(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What `machine_facts` returned, with the instructions in the name of the processor: `AMD EPYC (AVX512-BF16)`."""
    instructions = facts["instructions"].replace(" with bfloat16", "-BF16")
    return {**facts, "processor": f"{facts['processor']} ({instructions})"}


def write_about(path: Path, facts: Mapping[str, Any], new: bool = False) -> None:
    """Write `facts` as JSON. A fact that has changed since `path` was written becomes a list of its values in turn.

    `new`: whatever was written does not count.

    Raises ValueError if the file is damaged, OSError if the disk refuses.
    """
    before = {} if new else read_object(path)
    merged = {}
    for name, value in facts.items():
        seen = before.get(name, value)
        values = seen if isinstance(seen, list) else [seen]
        merged[name] = seen if values[-1:] == [value] else [*values, value]
    write_atomically(path, (json.dumps(merged, indent=2) + "\n").encode())


def write_run_facts(path: Path, compute: Compute, new: bool) -> None:
    """`write_about` with `run_facts`; a damaged file is replaced."""
    facts = run_facts(compute)
    try:
        write_about(path, facts, new)
    except ValueError:
        write_about(path, facts, new=True)

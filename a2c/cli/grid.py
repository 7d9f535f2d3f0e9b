"""`a2c compare` and `a2c sweep`: from --vary and --seeds to the runs, or one line that says what is wrong."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from a2c.cli.flags import ALIASES, parse_config
from a2c.cli.options import Compare, Sweep
from a2c.config.config import Config
from a2c.config.validation import check_count, nearest
from a2c.processes.limits import available_cores
from a2c.tools.runs import Run

PER_RUN = {
    "seed": "use --seeds",
    "run_dir": "out holds all runs",
    "resume": "the same command continues a comparison",
    "eval_every": "with keep_policy_every, policies are evaluated after each run",
    "eval_episodes": "kept policies play 30 episodes",
}
SWITCHES = {field.name for field in dataclasses.fields(Config) if isinstance(field.default, bool)}
MOST = 100_000  # seeds in a range


def make_runs(options: Compare, flags: Sequence[str]) -> list[Run]:
    """Every combination of the values in `vary`, with every seed; `flags` are those of `train` that all runs share.

    ValueError, in one line, for what `train` would refuse, and for what names a run twice.
    """
    check_count("jobs", options.jobs)
    seeds, grid = parse_seeds(options.seeds), parse_vary(options.vary)
    given = {re.sub("^--(no-)?", "", flag.split("=")[0]).replace("-", "_") for flag in flags if flag.startswith("--")}
    if isinstance(options, Sweep) and "stop_after" in {*given, *grid}:
        raise ValueError("stop_after must be left out of a sweep: use --budget")
    for name, instead in PER_RUN.items():
        if name in given:
            raise ValueError(f"{name} must be left out of a comparison: {instead}")
    for name in grid:
        if name in given:
            raise ValueError(f"{name} must be left out where --vary names it, got both")
    settings: dict[str, Run] = {}
    for values in itertools.product(*grid.values()):
        run = _setting(dict(zip(grid, values, strict=True)), flags)
        if options.jobs > 1 and not run.config.threads and "threads" not in {*given, *grid}:
            run = _with_threads(run, max(1, available_cores() // options.jobs))
        if run.setting in settings:
            raise ValueError(f"vary must make different settings, got {run.setting} twice")
        settings[run.setting] = run
    return [_with_seed(run, seed) for seed in seeds for run in settings.values()]


def parse_seeds(texts: Sequence[str]) -> list[int]:
    """The seeds that the words of `texts` name: 3, 0..4 (both included), or several with commas."""
    seeds: list[int] = []
    for part in " ".join(texts).replace(",", " ").split():
        ends = re.fullmatch(r"(-?\d+)(?:\.\.(-?\d+))?", part)
        low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if high < low:
            raise ValueError(f"seeds must be numbers or rising ranges such as 0..4, got {part!r}")
        if high - low >= MOST:
            raise ValueError(f"a range of seeds must have at most {MOST:,}, got {part!r}")
        seeds += range(low, high + 1)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be one or more different values, got {' '.join(texts)!r}")
    return seeds


def parse_vary(texts: Sequence[str]) -> dict[str, list[str]]:
    """Fields of `Config` and their values, from texts of the form FIELD=V1,V2."""
    known, grid = tuple(field.name for field in dataclasses.fields(Config)), {}
    for text in texts:
        name, equals, values = text.partition("=")
        flag = "--" + name.strip().removeprefix("--").replace("_", "-")
        field = ALIASES.get(flag, flag)[2:].replace("-", "_")
        if not equals:
            raise ValueError(f"vary must be FIELD=VALUE,VALUE, got {text!r}")
        if field not in known:
            raise ValueError(f"vary must name an option of train, got {name!r}; {nearest(field, known)}")
        if field in PER_RUN:
            raise ValueError(f"vary must not name {field}: {PER_RUN[field]}")
        if field in grid:
            raise ValueError(f"vary must name {field} once, got it twice")
        grid[field] = values.split(",")
    return grid


def _setting(values: dict[str, str], flags: Sequence[str]) -> Run:
    """The run of one combination of values, with the default seed."""
    flags = [*flags, *(_flag(name, value) for name, value in values.items())]
    config = parse_config(flags)
    varied = {name: _text(getattr(config, name)) for name in sorted(values)}
    setting = ",".join(f"{name}={value}" for name, value in varied.items()) or config.preset
    return Run(setting.replace("/", "-"), varied, config, tuple(flags))


def _flag(name: str, value: str) -> str:
    option = name.replace("_", "-")
    if name not in SWITCHES:
        return f"--{option}={value}"
    if value not in ("true", "false"):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return f"--{option}" if value == "true" else f"--no-{option}"


def _text(value: object) -> str:
    """A value as it is written after --vary, so that 1e-3 and 0.001 name the same directory."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _with_threads(run: Run, threads: int) -> Run:
    config = dataclasses.replace(run.config, threads=threads)
    return dataclasses.replace(run, config=config, flags=(*run.flags, "--threads", str(threads)))


def _with_seed(run: Run, seed: int) -> Run:
    config = dataclasses.replace(run.config, seed=seed)
    return dataclasses.replace(run, config=config, flags=(*run.flags, "--seed", str(seed)))

"""Flags of a command line to a `Config`, or one line that says what is wrong. It must not import torch."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import tyro

from a2c.config.config import Config

T = TypeVar("T")


def parse_config(args: Sequence[str], prog: str = "train.py") -> Config:
    """Flags to a Config: the run's own config on --resume, else the preset's, then every flag given."""
    default = Config.from_preset(value_of(args, "--preset") or "default")
    resume = value_of(args, "--resume")
    if resume is not None:
        if value_of(args, "--preset") is not None:
            raise ValueError(f"preset must be left out when resume is set, got {value_of(args, '--preset')}")
        from a2c.metrics.files import read_small  # with numpy, which no other command line needs

        try:
            text = read_small(Path(resume) / "config.json")
        except (OSError, ValueError) as error:
            raise ValueError(f"resume must be a run directory with a config.json, got {resume!r} ({error})") from error
        default = replace(Config.from_json(text), run_dir=None, stop_after=0)
    return parse(Config, prog, args, default)


def parse(kind: type[T], prog: str, args: Sequence[str] | None, default: T | None = None) -> T:
    """tyro's parser with its errors folded into one ValueError; --help and its exit pass through."""
    return parse_known(kind, prog, args, default, strict=True)[0]


def parse_known(
    kind: type[T], prog: str, args: Sequence[str] | None, default: T | None = None, strict: bool = False
) -> tuple[T, list[str]]:
    """`parse`, and the flags that `kind` does not know (`strict`: ValueError for those)."""
    errors = io.StringIO()
    kwargs: dict[str, Any] = {}
    if default is not None:
        kwargs["default"] = default
    try:
        with contextlib.redirect_stderr(errors):
            if strict:
                return tyro.cli(kind, prog=prog, args=args, **kwargs), []
            return tyro.cli(kind, prog=prog, args=args, return_unknown_args=True, **kwargs)
    except SystemExit as stop:
        if not stop.code:
            raise
        flags = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        raise ValueError(_one_line(errors.getvalue(), flags)) from None


def value_of(args: Sequence[str], flag: str) -> str | None:
    """The value that `args` gives to `flag`, before the other flags are read."""
    value = None
    for i, arg in enumerate(args):  # as tyro does, the last one counts
        if arg == flag and i + 1 < len(args):
            value = args[i + 1]
        elif arg.startswith(flag + "="):
            value = arg.split("=", 1)[1]
    return value


def _one_line(box: str, known: Sequence[str]) -> str:
    """The message inside tyro's box, without frame and advice, and the flag that was probably meant."""
    lines = [line.strip("│╭╮╰╯|+ ") for line in box.splitlines()[1:]]  # the first line is a title
    text = "\n".join("" if not line.strip("─- ") else line for line in lines).strip()
    message = " ".join(text.split("\n\n")[0].split("Got errors:")[0].split())
    message = message.removeprefix("Error parsing Config: ")
    unknown = [word.strip(",") for word in message.split() if word.startswith("--")]
    near: list[str] = []
    if "Unrecognized" in message and unknown:
        near = [flag for flag in known if flag.startswith(unknown[0])]
        near = near or difflib.get_close_matches(unknown[0], known, n=1)
    return f"{message}; did you mean {near[0]}?" if near else message

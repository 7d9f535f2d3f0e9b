"""Command-line arguments to options, or one line that says what is wrong. No torch is imported."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from a2c.cli.options import COMMANDS, Compare, Options, Plot
from a2c.config.config import Config
from a2c.config.validation import check_choice

ALIASES = {"--lr": "--learning-rate"}
INTEGERS = {
    name for kind in COMMANDS.values() for name, hint in get_type_hints(kind).items() if hint in (int, int | None)
}
NO_NUMBER = re.compile("Error parsing (--[a-z-]+): (invalid literal for int|could not convert string to float|no type)")
TRAIN = "Train an agent."
HELP = (
    "Train, evaluate and record actor-critic agents. `a2c COMMAND --help` lists the options of a command, "
    "`a2c --version` prints the version."
)


def parse_config(args: Sequence[str]) -> Config:
    """The settings of a run: those of the run to resume, else of the preset, changed by every flag in `args`.

    ValueError, in one line, for a bad flag or value; SystemExit(0) after `--help` and `--help-all`.
    """
    args = spell_out(args)
    defaults = _defaults(args)
    args = _full_help("train.py", args, defaults)
    config, unknown = _parse(Config, "train.py", args, default=defaults, description=TRAIN)
    refuse_unknown(unknown, Config, args)
    return _with_full_id(config)


def parse_command(args: Sequence[str]) -> tuple[Options, list[str]]:
    """The options of `a2c COMMAND ...`, and the arguments that it does not have: `compare` passes them to `train`.

    Raises as `parse_config` does.
    """
    args = spell_out(args)
    name = args[0] if args else ""
    if not args:
        raise ValueError(f"command must be one of {', '.join(COMMANDS)}; a2c --help explains them")
    if name not in ("-h", "--help") and not name.startswith("--tyro-"):  # the latter: shell completion
        check_choice("command", name, tuple(COMMANDS))
    defaults = _defaults(args if name == "train" else [])
    if name == "train":
        args = _full_help("a2c train", args, defaults)
    elif "--help-all" in args:  # of train alone
        args = [name, "--help"]
    notes = {command: tyro.conf.subcommand(command) for command in COMMANDS}
    notes["train"] = tyro.conf.subcommand("train", default=defaults, description=TRAIN)
    commands = reduce(or_, (Annotated[kind, notes[command]] for command, kind in COMMANDS.items()))
    try:
        options, unknown = _parse(commands, "a2c", args, description=HELP)
    except ValueError as error:
        if "Missing value for argument 'out'" not in str(error):
            raise
        # In `--preset cartpole DIR`, DIR may be a value of an option that only train knows.
        raise ValueError(f"the directory comes before the options of train: a2c {name} DIR [OPTIONS]") from None
    if not isinstance(options, Compare):
        refuse_unknown(unknown, type(options), args)
    else:  # those of train are read later
        mistyped = [word for word in unknown if word.startswith("--") and word.split("=")[0] not in _flags(Config)]
        refuse_unknown([word for word in mistyped if _near(word.split("=")[0], type(options), 0.75)], type(options))
    return (_with_full_id(options) if isinstance(options, Config) else _with_home(options)), unknown


def _full_help(prog: str, args: Sequence[str], defaults: Config) -> list[str]:
    """`args` with --help in place of --help-all; where they ask for --help, print the short one, then SystemExit(0)."""
    if not {"-h", "--help"}.isdisjoint(args):
        from a2c.cli.short_help import print_help  # with rich, which no other command line needs yet

        print_help(prog, defaults)
        raise SystemExit(0)
    return ["--help" if arg == "--help-all" else arg for arg in args]


def spell_out(args: Sequence[str]) -> list[str]:
    """`args` with short flags in full (`--lr`) and whole numbers such as 1e6 in digits; ValueError for an empty one."""
    words: list[str] = []
    for arg in args:
        flag, equals, value = arg.partition("=")
        if not arg or (equals and not value):  # as a path, it would be the working directory
            raise ValueError(f"{arg.rstrip('=') or 'an argument'} must not be empty, got ''")
        flag = ALIASES.get(flag, flag)
        if equals:
            words.append(f"{flag}={_in_digits(value) if _takes_integer(flag) else value}")
        else:
            words.append(_in_digits(arg) if words and _takes_integer(words[-1]) else flag)
    return words


def _takes_integer(flag: str) -> bool:
    return flag.startswith("--") and flag[2:].replace("-", "_") in INTEGERS


def _in_digits(number: str) -> str:
    if not re.fullmatch(r"(\d{1,30}\.?\d{0,30}|\.\d{1,30})(e\+?\d{1,2})?", number, re.IGNORECASE):
        return number
    exact = Fraction(number)
    return str(exact) if exact.denominator == 1 else number


def _with_full_id(config: Config) -> Config:
    from a2c.envs.single import find_spec  # gymnasium, which `--help` does not need

    return replace(config, env=find_spec(config.env).id)  # ValueError before torch is imported


def _with_home(options: Options) -> Options:
    """`options` with the home directory for ~ in paths: a shell leaves the one in `--out=~/video.gif`."""
    for name, value in vars(options).items():
        if isinstance(value, Path):
            options = replace(options, **{name: Path(os.path.expanduser(value))})  # type: ignore[arg-type]
    if isinstance(options, Plot):
        return replace(options, runs=tuple(Path(os.path.expanduser(path)) for path in options.runs))
    return options


def value_of(args: Sequence[str], flag: str) -> str | None:
    """The value that `args` give to `flag`, before the other flags are read."""
    value = None
    for i, arg in enumerate(args):  # as in tyro, the last one counts
        if arg == flag and i + 1 < len(args):
            value = args[i + 1]
        elif arg.startswith(flag + "="):
            value = arg.split("=", 1)[1]
    return value


def refuse_unknown(unknown: Sequence[str], kind: type[Options], args: Sequence[str] = ()) -> None:
    """ValueError for `unknown` ones of `args`, with the option of `kind` that was probably meant."""
    if not unknown:
        return
    first = unknown[0].split("=")[0]
    near = _near(first, kind)
    hint = f"; did you mean {near[0]}?" if near else ""
    switches = [field.name.replace("_", "-") for field in fields(kind) if isinstance(field.default, bool)]
    if switches and first.lower() in ("true", "false"):
        words = [word.replace("_", "-") for arg in args for word in arg.split("=", 1)]
        given = [flag.removeprefix("--").removeprefix("no-") for flag, value in pairwise(words) if value == first]
        meant = [name for name in given if name in switches]
        name = (meant or switches)[0]
        hint = f"; a switch takes no value: --{name} or --no-{name}" + ("" if meant else ", for example")
    raise ValueError(f"Unrecognized options: {', '.join(unknown)}{hint}")


def _flags(kind: type[Options]) -> list[str]:
    return ["--" + field.name.replace("_", "-") for field in fields(kind)]


def _near(flag: str, kind: type[Options], alike: float = 0.6) -> list[str]:
    """The flags of `kind` that start with `flag`, or else the most similar one."""
    begun = [known for known in _flags(kind) if flag.startswith("--") and known.startswith(flag)]
    return begun or difflib.get_close_matches(flag, _flags(kind), n=1, cutoff=alike)


def _defaults(args: Sequence[str]) -> Config:
    """What the flags in `args` change: the settings of the run to resume, else of the preset."""
    preset, resume = value_of(args, "--preset"), value_of(args, "--resume")
    if resume is None:
        return Config.from_preset(preset or "default")
    if preset is not None:
        raise ValueError(f"preset must be left out when resume is set, got {preset}")
    from a2c.run.run_dir import saved_config  # with numpy, which no other command line needs

    return saved_config(resume)


def _parse(kind: Any, prog: str, args: Sequence[str], **settings: Any) -> tuple[Any, list[str]]:
    """What tyro makes of `args`, and the arguments that it does not recognise; ValueError for a bad value."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(kind, prog=prog, args=args, return_unknown_args=True, **settings)
    except SystemExit as stop:
        if not stop.code:
            raise
        message = _one_line(errors.getvalue())
        if found := NO_NUMBER.match(message):
            rule = "an integer" if _takes_integer(found[1]) else "a number"
            message = f"{found[1]} must be {rule}, got {value_of(args, found[1])!r}"
        raise ValueError(message) from None


def _one_line(box: str) -> str:
    """The message in the box that tyro prints, without its frame and advice.

    tyro offers its errors in no other form but to hooks that it keeps private (`tyro._errors`, 1.0).
    """
    lines = [line.strip("│╭╮╰╯|+ ") for line in box.splitlines()[1:]]  # the first line is a title
    text = "\n".join("" if not line.strip("─- ") else line for line in lines).strip()
    message = " ".join(text.split("\n\n")[0].split())
    return re.sub(r"^Error parsing [^-][^:]*: ", "", message)  # names the options as a whole, not one of them

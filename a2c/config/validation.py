"""What a setting may be: the range of a number, the choices of a name, and the rules between settings.

Types and ranges are read from the annotations of `Config`, so that a setting is declared in one place.
This module imports neither torch nor gymnasium.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

MOST = 20  # names in an error message


@dataclass(frozen=True)
class Range:
    """The values that a number may take, from `low` to `high`, both included; `above`: `low` itself is excluded.

    Stands in the annotation of a field: `gamma: Annotated[float, Range(0.0, 1.0)]`.
    """

    low: float
    high: float
    above: bool = False

    def check(self, field: str, value: Any, integer: bool) -> None:
        """Raise ValueError if `value` of the setting `field` is not a number in this range."""
        if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
            raise ValueError(f"{field} must be {'an integer' if integer else 'a number'}, got {value!r}")
        if not self.low <= value <= self.high or (self.above and value == self.low):  # no comparison with NaN holds
            lowest = f"{'above' if self.above else 'at least'} {self.low}"
            raise ValueError(f"{field} must be {lowest} and at most {self.high}, got {value}")


def check(config: Any) -> None:
    """Raise ValueError naming the field, the rule and the value of the first bad setting of a `Config`."""
    for name, (types, allowed) in _rules(type(config)).items():  # type: ignore[arg-type]  # a class is hashable
        value = getattr(config, name)
        if types == (bool,) and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        if isinstance(allowed, tuple):
            check_choice(name, value, allowed)
        elif allowed is not None and not (value is None and NoneType in types):
            allowed.check(name, value, integer=int in types)
    _check_between_settings(config)


@cache
def _rules(kind: Any) -> dict[str, tuple[tuple[Any, ...], Range | tuple[str, ...] | None]]:
    """The types and the allowed values of each field of the dataclass `kind`; TypeError for a number without range."""
    rules: dict[str, tuple[tuple[Any, ...], Range | tuple[str, ...] | None]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        inner, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if get_origin(inner) is Literal:
            rules[name] = ((str,), get_args(inner))
            continue
        types = get_args(inner) or (inner,)
        allowed = next((note for note in notes if isinstance(note, Range)), None)
        if allowed is None and {int, float} & set(types):
            raise TypeError(f"{name} of {kind.__name__} must have a Range in its annotation, got {hint}")
        rules[name] = (types, allowed)
    return rules


def _check_between_settings(config: Any) -> None:
    if not config.env or not isinstance(config.env, str):
        raise ValueError(f"env must be a Gymnasium id, got {config.env!r}")
    if config.resume is not None and config.run_dir is not None:
        raise ValueError(f"run_dir must be left out when resume is set, got {config.run_dir}")
    if config.keep_policy_every and config.eval_every % config.keep_policy_every:
        rule = f"eval_every must be a multiple of keep_policy_every ({config.keep_policy_every})"
        raise ValueError(f"{rule}: kept policies are evaluated, got {config.eval_every}")
    if config.sliding_batch:
        _check_sliding(config)
    if config.algorithm != "a2c" and config.deterministic:
        raise ValueError(
            f"deterministic must be off for algorithm {config.algorithm}, which is never deterministic, got True"
        )
    for name in ("num_minibatches", "num_envs"):
        if config.algorithm == "a3c" and config.workers > (most := getattr(config, name)):
            raise ValueError(
                f"workers must be at most {name} ({most}) for algorithm a3c, whose workers learn from minibatches of "
                f"their own environments, got {config.workers}: raise {name}"
            )
    if config.crop and config.backend == "native":
        raise ValueError("crop must be off for backend native, which always scales the whole screen, got True")


def _check_sliding(config: Any) -> None:
    needed = {"gae_lambda": 1, "num_minibatches": 1, "epochs": 1, "algorithm": "a2c", "exploration_noise": 0}
    for name, only in needed.items():
        if getattr(config, name) != only:
            raise ValueError(f"{name} must be {only} when sliding_batch is set, got {getattr(config, name)}")
    if config.network == "lstm":
        raise ValueError("network must not be recurrent when sliding_batch is set, got lstm")


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint for an error message: the names closest to `name`, or all of them where none is close."""
    close = _close_to(name, known)
    more = f" and {len(known) - MOST} more" if len(known) > MOST else ""
    return f"did you mean {close}?" if close else f"known: {', '.join(sorted(known)[:MOST])}{more}"


def _close_to(name: str, known: Sequence[str]) -> str:
    return " or ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.5))


def check_choice(field: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise ValueError, with the nearest names, if `value` is not one of `known`."""
    if value not in known:
        close = _close_to(str(value), known)
        hint = f"; did you mean {close}?" if close else ""
        raise ValueError(f"{field} must be one of {', '.join(sorted(known))}, got {value!r}{hint}")


def check_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError, with the nearest names, for the first of `names` that is not one of `known`."""
    for name in names:
        check_choice(kind, name, tuple(known))


def check_count(field: str, value: Any) -> None:
    """Raise ValueError if `value` is not an integer of at least 1; NumPy's are integers, too."""
    if not isinstance(value, Integral) or value < 1:
        rule = "at least 1" if isinstance(value, Integral) else "at least 1, an integer"
        raise ValueError(f"{field} must be {rule}, got {value}")


def check_out(out: Path, endings: Sequence[str]) -> None:
    """What `check_ending` and `check_parent` refuse."""
    check_ending(out, endings)
    check_parent(out)


def check_ending(out: Path, endings: Sequence[str]) -> None:
    """ValueError if the file `out` is a directory or has none of the `endings`."""
    if out.is_dir():
        raise ValueError(f"out must be a file, got the directory {str(out)!r}")
    if out.suffix not in endings:
        raise ValueError(f"out must end in {' or '.join(endings)}, got {str(out)!r}")


def check_parent(out: Path) -> None:
    """ValueError if the file `out` lies in a directory that does not exist."""
    if not out.parent.is_dir():
        raise ValueError(f"out must lie in a directory that exists, got {str(out)!r}")

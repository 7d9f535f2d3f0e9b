"""What pages take from the source: comments `<!-- code: ... -->` and `<!-- table: ... -->` become code and tables.

::

    <!-- code: losses.py a2c_loss -->                           a function without its docstring
    <!-- code: losses.py a2c_loss "advantage =" "policy =" -->  from the line that begins so to the one that does
    <!-- table: train -->                                       the options of a command
    <!-- table: presets -->                                     what each preset changes

A file, name or line that does not exist, or a line that is not unique, ends the build.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shlex
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser
from mkdocs.exceptions import PluginError

from a2c.cli.options import COMMANDS
from a2c.config.presets import PRESETS
from a2c.config.validation import Range

PACKAGE = Path(__file__).parents[2] / "a2c"
COMMENT = re.compile(r"^<!-- (code|table): (.+?) -->$", flags=re.M)


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Replace the comments."""
    return COMMENT.sub(lambda match: (code if match[1] == "code" else table)(match[2]), markdown)


def on_page_content(content: str, **context: Any) -> str:
    """Drop the line with which a docstring announces an equation."""
    return content.replace("<p>::</p>\n", "")


def code(words: str) -> str:
    """A fenced block with a function of the package, or some of its lines, and their numbers."""
    file, name, *begins = shlex.split(words)
    source = (PACKAGE / file).read_text(encoding="utf-8")
    node, lines = _find(ast.parse(source), name, file), source.splitlines()
    body = node.body[1:] if ast.get_docstring(node) else node.body
    if begins:
        first, *_, last = (_line(body, lines, begin, f"{name} in {file}") for begin in (begins[0], *begins))
        last = max([last, *(one.end_lineno or last for one in ast.walk(node) if _begins_at(one, last))])
        shown, numbers = lines[first - 1 : last], f' linenums="{first}"'
    else:
        shown, numbers = (
            lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[body[0].lineno - 1 : node.end_lineno],
            "",
        )
    text = textwrap.dedent("\n".join(shown))
    return f'```python title="a2c/{file}: {name}"{numbers}\n{text}\n```'


def _find(tree: ast.Module, name: str, file: str) -> Any:
    """The function or method `name`, such as `a2c_loss` or `Rollout.returns`."""
    node: Any = tree
    for part in name.split("."):
        found = [one for one in node.body if getattr(one, "name", None) == part]
        if not found:
            raise PluginError(f"there is no {name} in a2c/{file}")
        node = found[0]
    return node


def _line(body: list[ast.stmt], lines: list[str], begin: str, where: str) -> int:
    """The number of the only line of `body` that begins with `begin`."""
    inside = range(body[0].lineno, (body[-1].end_lineno or 0) + 1)
    numbers = [number for number in inside if lines[number - 1].strip().startswith(begin)]
    if len(numbers) != 1:
        raise PluginError(f"one line of {where} must begin with {begin!r}, found {len(numbers)}")
    return numbers[0]


def _begins_at(node: ast.AST, line: int) -> bool:
    """Whether `node` is a statement on `line` that no other statement is a part of."""
    return isinstance(node, ast.stmt) and node.lineno == line and not hasattr(node, "body")


def table(name: str) -> str:
    """The options of the command `name`, a table for each of their groups, or what all presets change."""
    if name == "presets":
        return _presets()
    if name not in COMMANDS:
        raise PluginError(f"there is no command {name}")
    kind = COMMANDS[name]
    classes = [one for one in reversed(kind.__mro__) if dataclasses.is_dataclass(one)]  # that it inherits first
    texts = {
        one.arg_name: one.description for part in classes for one in docstring_parser.parse_from_object(part).params
    }
    rows, sections, hints = [], _sections(classes[0]), get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if field.name in sections:
            rows += [f"\n**{sections[field.name].capitalize()}**\n"] if len(sections) > 1 else []
            rows += ["| option | values | default | meaning |", "| --- | --- | --- | --- |"]
        default = "" if field.default in (dataclasses.MISSING, ()) else f"`{_text(field.default)}`"
        option, values = _option(field.name, hints[field.name]), _values(hints[field.name])
        rows.append(f"| `{option}` | {values} | {default} | {texts[field.name]} |")
    return "\n".join(rows)


def _sections(kind: type) -> dict[str, str]:
    """Titles of the tables, by the field that each begins with: the comments in the class, which `Config` has."""
    title, found = "general", {}
    for line in inspect.getsource(kind).splitlines():
        if heading := re.match(r"    # --- (.+?) -+$", line):
            title = heading[1]
        elif title and (field := re.match(r"    (\w+): ", line)):
            found[field[1]], title = title, ""
    return found


def _option(name: str, hint: Any) -> str:
    return name.upper() if "Positional" in repr(hint) else "--" + name.replace("_", "-")


def _values(hint: Any) -> str:
    """What an option takes, in a few words."""
    inner, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(inner) is Literal:
        return ", ".join(f"`{one}`" for one in get_args(inner))
    allowed = next((note for note in notes if isinstance(note, Range)), None)
    if allowed is not None:
        low, high = _number(allowed.low), _number(allowed.high)
        return f"above {low}, to {high}" if allowed.above else f"{low} to {high}"
    named = next((note.metavar for note in notes if getattr(note, "metavar", None)), None)
    if named is not None:
        return str(named).lower().replace("|", " or ")
    names = {bool: "flag", str: "text", int: "integer", tuple[str, ...]: "texts"}
    return names.get(inner, "path")


def _number(bound: float) -> str:
    return (
        f"{bound:,.0f}" if bound == int(bound) and bound < 1e7 else f"{bound:.0e}".replace("e+0", "e").replace("+", "")
    )


def _presets() -> str:
    rows = ["| preset | what it changes |", "| --- | --- |"]
    for name, changes in PRESETS.items():
        listed = ", ".join(f"`{field}={_text(value)}`" for field, value in changes.items())
        rows.append(f"| `{name}` | {listed or 'nothing'} |")
    return "\n".join(rows)


def _text(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)

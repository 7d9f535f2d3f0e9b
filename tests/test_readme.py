"""README.md and the other documents: length, links, options, names; the library example runs as pasted."""

import ast
import pkgutil
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from a2c.cli.commands import main
from a2c.cli.flags import ALIASES
from a2c.cli.options import COMMANDS
from a2c.config.presets import PRESETS
from a2c.metrics.logger import METRICS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [*GUIDES, *(ROOT / name for name in ("CHANGELOG.md", "results/README.md", "examples/README.md"))]


def section(title):
    """The text under a heading, up to the next one of any level."""
    return re.split(r"^#+ ", README.split(f"# {title}\n")[1], flags=re.M)[0]


def first_cells(text):
    """Every `name` in the first column of a table."""
    return {name for line in text.splitlines() for name in re.findall(r"`([^`]+)`", line.partition(" | ")[0])}


def anchors(path):
    """What a link may name after #: the headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_short_above_the_reference_part():
    assert len(README.split("\n## Reference\n")[0].split()) <= 900


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_have_nothing_left_to_do_and_every_relative_link_leads_somewhere(path):
    text = path.read_text(encoding="utf-8")
    assert "TODO" not in text
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_documents_name_only_options_that_exist(capsys):
    known = {"--help", "--help-all", *ALIASES}
    known |= {name for action in get_args_parser()._actions for name in action.option_strings}  # of torchrun
    for args in ("--help", "train --help-all", *(f"{name} --help" for name in COMMANDS if name != "train")):
        with suppress(SystemExit):
            main(args.split())
        known |= set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    for script in (ROOT / "benchmarks").glob("*.py"):
        text = script.read_text(encoding="utf-8")
        known |= {f"--{name.replace('_', '-')}" for name in re.findall(r"^    (\w+): .* = ", text, flags=re.M)}
        known |= set(re.findall(r'add_argument\("(--[a-z-]+)"', text))
    for path in GUIDES:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", path.read_text(encoding="utf-8")))
        assert not named - known, path.name


def test_readme_names_only_presets_and_metrics_that_exist():
    assert first_cells(section("Command line")) == set(PRESETS)
    assert first_cells(section("Metrics")) <= set(METRICS)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, flags=re.S))
def test_readme_library_example_runs_as_pasted(block, tmp_path):
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


SOURCES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "a2c").rglob("*.py")}
FOLDERS = "|".join(["a2c", "tests", "benchmarks", *(path.name for path in (ROOT / "a2c").iterdir() if path.is_dir())])


def members():
    """The methods, fields and attributes of every class of the package, by its name."""
    found = {}
    for node in (node for tree in SOURCES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        names = {getattr(n, "name", getattr(n, "attr", getattr(n, "id", None))) for n in ast.walk(node)}
        found.setdefault(node.name, set()).update(names)
    return found


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_documents_name_only_files_and_attributes_that_exist(path):
    text, known = path.read_text(encoding="utf-8"), members()
    for name in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/]+\.py", text):
        assert (ROOT / name).exists() or (ROOT / "a2c" / name).exists() or "NAME" in name, name
    for owner, name in re.findall(r"`([A-Z]\w+)\.(?!md`)(\w+)(?:\(.*?\))?`", text):
        assert name in known.get(owner, ()), f"{owner}.{name}"
    for name, file in re.findall(r"`(?:\w+\.)?(\w+)(?:\(\w*\))?`,? in `(?:a2c/)?([\w/]+\.py)`", text):
        source = next(place / file for place in (ROOT, ROOT / "a2c") if (place / file).exists())
        assert re.search(rf"\b{name}\b", source.read_text(encoding="utf-8")), f"{name} in {file}"
    for name in re.findall(r"`(a2c(?:\.\w+)+)(?:\(.*?\))?`", text):
        assert pkgutil.resolve_name(name), name


def test_every_metric_is_explained():
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    cells = {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert cells == set(METRICS)

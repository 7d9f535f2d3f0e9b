"""The documentation site: it builds without a warning, needs no network, and shows what the source says."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import a2c
from a2c.cli.options import COMMANDS

ROOT = Path(__file__).parents[2]
WANTED = {"mkdocs", "material", "mkdocstrings_handlers", "latex2mathml"}
MISSING = sorted(name for name in WANTED if importlib.util.find_spec(name) is None)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f'needs {", ".join(MISSING)}: pip install -e ".[docs]"')
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
LOADING_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}


class Page(HTMLParser):
    """What a page loads, where it links to, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.loads, self.links, self.anchors = [], [], set()
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag in LOADS:
            self.loads.append(values.get(LOADS[tag]) or "")
        if tag == "link" and LOADING_LINKS & set((values.get("rel") or "").split()):
            self.loads.append(values["href"])
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of a fresh build, by their path; a proxy that answers nobody stands for the network."""
    out = tmp_path_factory.mktemp("site")
    proxies = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | proxies, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {path: Page(path) for path in sorted(out.rglob("*.html"))}


def page_of(site, name):
    return next(page for path, page in site.items() if path.name == name)


@pytest.mark.slow
def test_no_page_or_style_loads_anything_from_the_network(site):
    for path, page in site.items():
        assert not [url for url in page.loads if urlsplit(url).netloc], path
        assert not re.findall(r"url\(['\"]?(?:https?:)?//|@import", page.text), path
        assert 'class="mermaid"' not in page.text  # the theme would fetch what draws it
    styles = [*next(iter(site)).parents[0].rglob("*.css")]
    assert styles
    for style in styles:
        assert not re.findall(r"url\(['\"]?(?:https?:)?//|@import", style.read_text(encoding="utf-8")), style


@pytest.mark.slow
def test_every_relative_link_leads_to_a_page_and_its_anchor(site):
    for path, page in site.items():
        if path.name == "404.html":  # its links are absolute: it is shown at any depth
            continue
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert target.is_file(), (path, link)
            assert not url.fragment or target not in site or unquote(url.fragment) in site[target].anchors, (path, link)


@pytest.mark.slow
def test_files_outside_of_docs_are_pages_and_no_hook_is(site):
    names = {path.name for path in site}
    assert {"CHANGELOG.html", "CONTRIBUTING.html", "losses.py.html"} <= names
    assert not [path for path in site if "hooks" in path.parts]


@pytest.mark.slow
def test_equations_and_excerpts_are_on_the_page_of_the_algorithm(site):
    text = page_of(site, "algorithm.html").text
    assert text.count('<div class="equation"><math') == (ROOT / "docs/algorithm.md").read_text().count("$$") // 2
    assert "arithmatex" not in text and "<!-- code" not in text
    for path in site.values():
        assert "<mtext mathcolor" not in path.text  # what an unknown command of LaTeX becomes
    code = re.sub(r"<[^>]+>", "", text)
    for line in (
        "total = policy + value_coef * value - entropy_coef * entropy",
        "near = rewards + gamma * torch.where",
    ):
        assert line in code


@pytest.mark.slow
def test_the_reference_has_every_public_name_and_every_option(site):
    page = page_of(site, "reference.html")
    text = re.sub(r"<[^>]+>", "", page.text)
    for name in a2c.__all__:
        assert f"a2c.{name}" in text, name
    assert "::\n" not in text
    for command, kind in COMMANDS.items():
        for field in dataclasses.fields(kind):
            name = field.name if field.default is dataclasses.MISSING else "--" + field.name.replace("_", "-")
            assert f">{name.upper() if name == field.name else name}<" in page.text, (command, name)


@pytest.fixture
def generated():
    """The hook that takes code and tables from the source."""
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs/hooks/generated.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_excerpt_is_what_the_source_says(generated):
    block = generated.code('losses.py a2c_loss "advantage = returns" "assert advantage"')
    assert block.splitlines()[1:-1] == [
        "advantage = returns - values.detach()  # [B]",
        "assert advantage.shape == log_prob.shape",
    ]
    number = int(re.search(r'linenums="(\d+)"', block)[1])
    assert "advantage = returns" in (ROOT / "a2c/losses.py").read_text().splitlines()[number - 1]
    whole = generated.code("learner.py Learner.set_counts").splitlines()
    assert whole[1].startswith("def set_counts(self") and '"""' not in "".join(whole)


@pytest.mark.parametrize(
    "words",
    ["losses.py no_such_function", 'losses.py a2c_loss "no such line"', 'losses.py a2c_loss "if"'],
)
def test_an_excerpt_that_does_not_exist_or_is_not_unique_ends_the_build(generated, words):
    from mkdocs.exceptions import PluginError

    with pytest.raises(PluginError):
        generated.code(words)


def test_a_table_has_ranges_choices_and_defaults(generated):
    lines = generated.table("train").splitlines()
    assert any(line.startswith("| `--gamma` | 0 to 1 | `0.99` | Discount factor") for line in lines)
    assert any(line.startswith("| `--learning-rate` | above 0, to 10 | `0.001` |") for line in lines)
    assert any(line.startswith("| `--algorithm` | `a2c`, `a3c`, `ga3c` | `a2c` |") for line in lines)
    assert "**Environments**" in lines
    inherited = generated.table("sweep").splitlines()
    assert inherited[0].startswith("| option |") and inherited[2].startswith("| `OUT` | path |")
    assert inherited[-1].startswith("| `--budget` | decisions or time | `None` | Decisions of all runs")

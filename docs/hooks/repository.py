"""Files of the repository that a page links to, outside of docs/, become pages and files of the site.

A document is rendered, a source file is shown with line numbers, any other file is served as it is, and a directory is
its README.md, or a list of its files. So a relative link works in the repository and on the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PREFIX = "repository/"  # of the pages that are made here
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".txt": "text", ".cff": "yaml", "": "text"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"  # a source file would be found for every word
FENCED = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", flags=re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page or a file for everything outside of docs/ that a page links to, and for what that links to."""
    todo = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for document in todo:
        for target in sorted(set(_outside_links(document))):
            path = _readme_of(target)
            if path and files.get_file_from_path(_site_path(path)) is None:
                files.append(_file_of(path, config))
                todo += [path] if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links that leave docs/ to the pages that `on_files` has added."""
    here = page.file.src_uri
    document = here.removeprefix(PREFIX) if here.startswith(PREFIX) else f"docs/{here}"

    def rewritten(match: re.Match[str]) -> str:
        link, _, anchor = match[1].partition("#")
        path = _target(document, link)
        if path is None or not (path := _readme_of(path)):
            return match[0]
        relative = posixpath.relpath(_site_path(path), posixpath.dirname(here) or ".")
        return f"]({relative}#{anchor})" if anchor else f"]({relative})"

    return _outside_code(markdown, lambda text: LINK.sub(rewritten, text)) if document.endswith(".md") else markdown


def _outside_links(document: str) -> list[str]:
    """The paths in the repository that `document` links to, without those of docs/."""
    text = FENCED.sub("", (ROOT / document).read_text(encoding="utf-8"))
    targets = [_target(document, link.partition("#")[0]) for link in LINK.findall(text)]
    return [target for target in targets if target and not target.startswith("docs/")]


def _target(document: str, link: str) -> str | None:
    """The path in the repository of a relative `link` of `document`; None where there is none."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(document), link))
    leaves = path.startswith("../") or not link or "://" in link
    return None if leaves or not (ROOT / path).exists() else path


def _readme_of(path: str) -> str:
    """The README.md of a directory that has one, else `path`."""
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path


def _site_path(path: str) -> str:
    """Where a file of the repository lies among the pages."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    name = Path(path)
    page = (ROOT / path).is_dir() or (name.suffix in LANGUAGES and name.suffix != ".md")
    return f"{PREFIX}{path}.md" if page else f"{PREFIX}{path}"


def _file_of(path: str, config: MkDocsConfig) -> File:
    full, uri, listed = ROOT / path, _site_path(path), {"inclusion": InclusionLevel.NOT_IN_NAV}
    if full.is_dir():
        names = sorted(str(one.relative_to(full)) for one in full.rglob("*") if one.is_file())
        text = f"# {path}\n\n" + "".join(f"* `{name}`\n" for name in names)
    elif Path(path).suffix in LANGUAGES:
        code = full.read_text(encoding="utf-8")
        text = f'{UNSEARCHED}# {path}\n\n````{LANGUAGES[Path(path).suffix]} linenums="1"\n{code}````\n'
    else:
        return File.generated(config, uri, abs_src_path=str(full), **listed)
    return File.generated(config, uri, content=text, **listed)


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """`markdown` with `change` applied to what is no code."""
    pieces, end = [], 0
    for code in FENCED.finditer(markdown):
        pieces += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, change(markdown[end:])])

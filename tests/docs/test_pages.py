"""Python blocks of the how-to pages run as they are, those of a page one after the other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
PAGES = [page for page in PAGES if page.name != "export.md"]  # it needs a model: tests/tools/test_onnx_model.py
BLOCKS = {
    page: re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S) for page in PAGES
}


def test_some_pages_have_blocks():
    assert sum(map(bool, BLOCKS.values())) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if BLOCKS[page]], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, tmp_path):
    code = "\n".join(BLOCKS[page])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

"""Equations: LaTeX between dollar signs becomes MathML, which browsers draw themselves."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.+?)\\\)</span>', flags=re.S)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.+?)\\\]\s*</div>', flags=re.S)


def on_page_content(content: str, **context: Any) -> str:
    """Replace the equations that arithmatex has marked."""
    content = INLINE.sub(lambda match: convert(html.unescape(match[1])), content)
    return BLOCK.sub(
        lambda match: f'<div class="equation">{convert(html.unescape(match[1]), display="block")}</div>', content
    )

"""Render formulas as MathML, which browsers show without JavaScript: a hook of MkDocs.

`pymdownx.arithmatex` marks the formulas of a page, between `$` or `$$`, also those of docstrings.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_MARKED = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace the formulas of one page; called by MkDocs after the page is rendered.

    Raises:
        ValueError: a formula is not LaTeX that can be rendered.
    """
    return _MARKED.sub(_rendered, content)


def _rendered(match: re.Match[str]) -> str:
    latex = html.unescape(match[2]).strip()[2:-2]  # without \( \) or \[ \]
    display = "block" if match[1] == "div" else "inline"
    try:
        found: str = convert(latex.strip(), display=display)
    except Exception as error:
        msg = f"formula {latex!r} cannot be rendered: {type(error).__name__}: {error}"
        raise ValueError(msg) from error
    return found

"""Link from a documentation page to files outside docs/, as `../examples/demo/demo.toml`.

Such a link works in a checkout and on a code host. In the built site it leads to the file on the code host. A link to
a file that does not exist is left as it is, so that the strict build reports it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite links of one page; called by MkDocs before the page is rendered."""
    folder = Path(page.file.abs_src_path).parent

    def rewritten(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        inside = path.is_relative_to(Path(config.docs_dir)) or not path.is_relative_to(ROOT)
        if inside or not path.exists():
            return match[0]
        view = "tree" if path.is_dir() else "blob"
        return f"]({config.repo_url.rstrip('/')}/{view}/main/{path.relative_to(ROOT).as_posix()}{match[2] or ''})"

    return _LINK.sub(rewritten, markdown)

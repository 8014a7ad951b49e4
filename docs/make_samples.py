"""Copy tested files into the code blocks of the documentation: `python docs/make_samples.py`.

A block that follows `<!-- examples/FILE -->` shows that file. Readers on a code host see the code, and
`tests/unit/test_docs.py` fails if it is not that of the file.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"<!-- (?P<file>examples/\S+) -->\n```(?P<language>\w+)\n.*?^```$", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """Pages that may show a file."""
    return sorted((ROOT / "docs").rglob("*.md"))


def filled(text: str) -> str:
    """Return a page whose blocks show their files as they are."""

    def block(match: re.Match[str]) -> str:
        code = (ROOT / match["file"]).read_text().rstrip("\n")
        return f"<!-- {match['file']} -->\n```{match['language']}\n{code}\n```"

    return BLOCK.sub(block, text)


def main() -> None:
    """Update all pages."""
    for page in pages():
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)


if __name__ == "__main__":
    main()

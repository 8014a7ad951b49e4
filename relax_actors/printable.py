"""Text that cannot steer the terminal that shows it.

Names, errors and completions come from other processes and from models. A terminal obeys control characters in them:
an escape sequence moves the cursor or sets a link, a bidi override reverses what is read, a newline forges a line.
"""

from __future__ import annotations

import json
import re

_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that take no ink although `str.isprintable` accepts them."""


def printable(text: object) -> str:
    r"""Return a text as one line, with unprintable characters as JSON escapes (`\u001b`).

    The result of a JSON document is JSON with the same value.
    """
    plain = str(text)
    if plain.isprintable() and not _INVISIBLE.search(plain):
        return plain
    return "".join(map(_shown, plain))


def printable_lines(text: object, indent: str = "") -> str:
    """Return a text with its lines; each is made printable and begins with `indent`.

    Indent text of others that has several lines, e.g. a traceback, so that no line of it reads as one of relax.
    """
    return "\n".join(indent + printable(line.expandtabs(4)) for line in str(text).split("\n"))


def _shown(character: str) -> str:
    if character.isprintable() and not _INVISIBLE.match(character):
        return character
    return json.dumps(character)[1:-1]

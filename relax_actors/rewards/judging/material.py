r"""Texts of others as parts of a judge's message, which they cannot leave.

A part is written as a JSON string: quotes, line breaks and control characters are escaped. Characters that begin tokens
of chat templates, `<` and `[`, are escaped, too, and so are special tokens that begin otherwise. Quotes are spelled
`\u0022`, so that a tokenizer without a backslash does not leave a quote of its own. Characters that a tokenizer may
normalise to these (NFKC), such as those of full width, are escaped as well.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping

SIGNS = "<[\x85\u2028\u2029"
NORMALISED = frozenset('"\\<[')
"""Signs to which no character of a part may be normalised."""


def escaped(text: str, special: Iterable[str] = ()) -> str:
    """Return a text as the inside of a JSON string, without `<`, `[` and special tokens."""
    written = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', _code('"'))
    if not written.isascii():
        hidden = {c for c in written if not c.isascii() and NORMALISED & {*unicodedata.normalize("NFKC", c)}}
        written = "".join(_code(character) if character in hidden else character for character in written)
    for sign in SIGNS:
        written = written.replace(sign, _code(sign))
    for token in special:
        if token and token in written:
            written = written.replace(token, _code(token[0]) + token[1:])
    return written


def material(parts: Mapping[str, str], special: Iterable[str] = ()) -> str:
    """Return texts by name as a JSON object, one a line; see `escaped`."""
    tokens = tuple(special)
    lines = [f' "{name}": "{escaped(text, tokens)}"' for name, text in parts.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def _code(character: str) -> str:
    return f"\\u{ord(character):04x}" if character.isascii() else json.dumps(character)[1:-1]

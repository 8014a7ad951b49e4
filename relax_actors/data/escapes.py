r"""Texts that a tokenizer cannot encode, spelled with characters that it can.

What environments, tools and agents say is not written for one model: an error text may hold letters that a small
alphabet lacks. Such a character becomes its escape (`\x41`, `\u2713`), else "?", else nothing: the first of them that
the tokenizer can encode. The result depends on the text and the vocabulary alone, so a replay reads the same tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_KNOWN = 1 << 16
"""Characters whose spelling is remembered."""


@dataclass(frozen=True, slots=True)
class Spelled:
    """A text that a tokenizer can encode.

    Attributes:
        text: the text.
        escaped: characters of the original text that are written in another way.
        dropped: characters that are left out.
    """

    text: str
    escaped: int
    dropped: int


class Escapes(dict[int, str]):
    """Spelling of each character by its code point; a table for `str.translate`.

    Args:
        encodes: whether the tokenizer can encode a text.
        special: texts of tokens that are kept whole, such as `<|im_end|>`.
    """

    def __init__(self, encodes: Callable[[str], bool], special: Iterable[str] = ()) -> None:
        super().__init__()
        self._encodes = encodes
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def __missing__(self, point: int) -> str:
        character = chr(point)
        spellings = (character, escape(character), "?")
        found = next((text for text in spellings if self._encodes(text)), "")
        if len(self) < MAX_KNOWN:
            self[point] = found
        return found

    def lacking(self, text: str) -> str:
        """Return the distinct characters of a text that the tokenizer cannot encode, in order."""
        return "".join(character for character in dict.fromkeys(text) if self[ord(character)] != character)

    def spell(self, text: str) -> Spelled:
        """Return a text with other spellings of the characters that the tokenizer cannot encode."""
        parts = [text] if self._special is None else self._special.split(text)
        # Every other part is a special token.
        counts: Counter[str] = Counter()
        for n in range(0, len(parts), 2):
            counts.update(parts[n])
            parts[n] = parts[n].translate(self)
        spellings = {character: self[ord(character)] for character in counts}
        dropped = sum(n for character, n in counts.items() if not spellings[character])
        other = sum(n for character, n in counts.items() if spellings[character] != character)
        return Spelled("".join(parts), other - dropped, dropped)


def escape(character: str) -> str:
    """Return the escape of a character, as Python writes it in a literal."""
    point = ord(character)
    if point < 1 << 8:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 1 << 16 else f"\\U{point:08x}"

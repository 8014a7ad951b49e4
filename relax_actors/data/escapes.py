r"""Texts that a tokenizer cannot encode, spelled with characters that it can.

What environments, tools and agents say is not written for one model: an error text may hold letters that a small
alphabet lacks. Such a character becomes its escape (`\x41`, `\u2713`), else "?", else nothing: the first of them that
the tokenizer can encode. The result depends on the text and the vocabulary alone, so a replay reads the same tokens.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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

    Tokens of `special`, such as `<|im_end|>`, are kept whole; `encodes` says whether the tokenizer can encode a text.
    """

    def __init__(self, encodes: Callable[[str], bool], special: Iterable[str] = ()) -> None:
        super().__init__()
        self._encodes = encodes
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def __missing__(self, point: int) -> str:
        character = chr(point)
        spellings = (character, escape(character), "?")
        spelling = next((text for text in spellings if self._encodes(text)), "")
        if len(self) < MAX_KNOWN:
            self[point] = spelling
        return spelling

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


class PlainTexts:
    r"""Breaks special tokens in texts of others, which could end or begin a message.

    The first character of a token becomes its escape: `<|im_end|>` is written as `\x3c|im_end|>`. Tokens are also found
    in characters that a tokenizer may normalise to theirs (NFKC), such as those of full width.
    """

    def __init__(self, special: Iterable[str]) -> None:
        tokens = {unicodedata.normalize("NFKC", token) for token in special} - {""}
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        # Tokens may overlap: a lookahead finds where each begins.
        self._begins = re.compile(f"(?={'|'.join(map(re.escape, longest_first))})") if tokens else None

    def of(self, text: str) -> str:
        """Return a text without special tokens; a text that has none is returned as it is."""
        if self._begins is None:
            return text
        forms = text if text.isascii() else [unicodedata.normalize("NFKC", character) for character in text]
        begins = {match.start() for match in self._begins.finditer("".join(forms))}
        if not begins:
            return text
        origins = [at for at, form in enumerate(forms) for _ in form]
        broken = {origins[begin] for begin in begins}
        return "".join(escape(character) if at in broken else character for at, character in enumerate(text))

    def within(self, value: Any) -> Any:
        """Return a JSON value without special tokens in its texts and keys."""
        match value:
            case str():
                return self.of(value)
            case dict():
                return {self.within(key): self.within(item) for key, item in value.items()}
            case list() | tuple():
                return [self.within(item) for item in value]
        return value


def escape(character: str) -> str:
    """Return the escape of a character, as Python writes it in a literal."""
    point = ord(character)
    if point < 1 << 8:
        return f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 1 << 16 else f"\\U{point:08x}"

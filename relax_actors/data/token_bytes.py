"""Bytes that a token adds to a text; tokens may end within a letter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""A token of a single byte in vocabularies with byte fallback."""


class TokenBytes:
    """Maps a token id to its UTF-8 bytes, those of a special token included.

    The bytes are those that the token adds after another one. A decoder may omit the space before the first word of a
    text; here it is part of the word's token.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        decoder: Any = inner.decoder
        kinds = set() if decoder is None else set(_kinds(json.loads(decoder.__getstate__())))
        self._letters = _byte_letters() if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds
        # A word between two others: what a decoder does at the ends of a text then concerns the other two.
        self._word = next((i for i in range(inner.get_vocab_size()) if self._decode(i).isalnum()), None)

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id outside the vocabulary."""
        text = self._inner.id_to_token(token)
        if text is None:
            return b""
        if self._letters:
            data = [self._letters.get(letter, -1) for letter in text]
            return text.encode() if -1 in data else bytes(data)
        if self._falls_back and (byte := FALLBACK.fullmatch(text)):
            return bytes.fromhex(byte[1])
        if self._word is None:
            return self._decode(token).encode()
        word = self._word
        before, both, whole = (self._decode(*ids) for ids in ([word], [word, word], [word, token, word]))
        return whole.removeprefix(before).removesuffix(both.removeprefix(before)).encode()

    def _decode(self, *tokens: int) -> str:
        return str(self._inner.decode(list(tokens), skip_special_tokens=False))


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    """Yield the type of a decoder and those of its parts."""
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def _byte_letters() -> dict[str, int]:
    """Return the bytes by their letters in byte-level vocabularies, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}

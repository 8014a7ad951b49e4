"""Count the items of a msgpack message without decoding it.

An empty list takes one byte in a message and 56 in memory, so the size of a message alone does not bound what decoding
it takes.
"""

from __future__ import annotations

from broker.errors import CodecError

_FIXED = {
    0xC0: 0,
    0xC2: 0,
    0xC3: 0,
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
    0xD4: 2,
    0xD5: 3,
    0xD6: 5,
    0xD7: 9,
    0xD8: 17,
}
"""Bytes after the first one of numbers, constants and short extensions, by the first byte."""
_SIZED = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
}
"""Bytes of the size, and bytes beside the content, of byte strings, extensions and texts."""
_COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Bytes of the count, and items per entry, of lists and maps."""


def check_items(data: bytes, limit: int) -> None:
    """Raise CodecError if a message has more than `limit` items, at all depths together.

    A malformed message passes: decoding it fails at the same place.
    """
    at, left, seen, end = 0, 1, 0, len(data)
    while left and at < end:
        left -= 1
        seen += 1
        if seen + left > limit:
            msg = f"the message has more than {limit} items; pass large data as arrays"
            raise CodecError(msg)
        first = data[at]
        at += 1
        if first < 0x80 or first >= 0xE0:  # noqa: PLR2004 small integers
            continue
        if first < 0x90:  # noqa: PLR2004 map
            left += 2 * (first & 15)
        elif first < 0xA0:  # noqa: PLR2004 list
            left += first & 15
        elif first < 0xC0:  # noqa: PLR2004 text
            at += first & 31
        elif first in _FIXED:
            at += _FIXED[first]
        elif first in _SIZED:
            width, more = _SIZED[first]
            at += width + more + int.from_bytes(data[at : at + width], "big")
        elif first in _COUNTED:
            width, each = _COUNTED[first]
            left += each * int.from_bytes(data[at : at + width], "big")
            at += width
        else:
            return

"""Task of the demo: sort the digits of a number, "5039>" to "0359#"."""

from __future__ import annotations

import random
import zlib

DIGITS, PARTS = 4, 8
"""Digits of a number, and parts of all numbers, of which one is held out: training never sees it."""


def make(*, size: int | None, seed: int, digits: int = DIGITS, held_out: bool = False) -> list[tuple[str, str]]:
    """Return `size` random numbers of `digits` digits, at least 3; the answer has the digits in ascending order."""
    source = random.Random(seed)  # noqa: S311 not a secret
    wanted, numbers = size or 10_000, list[str]()
    while len(numbers) < wanted:
        drawn = "".join(source.choices("0123456789", k=digits * wanted))
        cut = (drawn[start : start + digits] for start in range(0, len(drawn), digits))
        numbers += [number for number in cut if (zlib.crc32(number.encode()) % PARTS == 0) == held_out]
    return [(f"{number}>", "".join(sorted(number))) for number in numbers[:wanted]]

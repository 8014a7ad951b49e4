"""Sort the digits of a number, "5039>" to "0359": examples, and pairs whose rejected answer has two digits swapped."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from itertools import islice

from relax_actors import Task

DIGITS, PARTS = 4, 8
"""Digits of a number, and parts of all numbers, of which one is held out: training never sees it."""


def examples(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return `size` random numbers with their digits in ascending order."""
    numbers = islice(_numbers(seed, held_out=held_out), size or 4000)
    return [Task(f"{number}>", "".join(sorted(number))) for number in numbers]


def pairs(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return `size` pairs of a sorted and a nearly sorted answer."""
    source = random.Random(seed + 1)  # noqa: S311 not a secret
    found: list[Task] = []
    for number in _numbers(seed, held_out=held_out):
        right = sorted(number)
        places = [i for i in range(DIGITS - 1) if right[i] != right[i + 1]]
        if places:
            i = source.choice(places)
            wrong = [*right[:i], right[i + 1], right[i], *right[i + 2 :]]
            found.append(Task(f"{number}>", metadata={"chosen": "".join(right), "rejected": "".join(wrong)}))
        if len(found) == (size or 4000):
            break
    return found


def _numbers(seed: int, *, held_out: bool) -> Iterator[str]:
    source = random.Random(seed)  # noqa: S311 not a secret
    while True:
        number = "".join(source.choices("0123456789", k=DIGITS))
        if (zlib.crc32(number.encode()) % PARTS == 0) == held_out:
            yield number

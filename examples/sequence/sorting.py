"""Sort the digits of a number, "5039>" to "0359": examples, and pairs whose rejected answer has two digits swapped."""

from __future__ import annotations

import random
from collections.abc import Iterator

from relax_actors import Task

DIGITS = 4


def examples(*, size: int | None, seed: int) -> list[Task]:
    """Return `size` random numbers with their digits in ascending order."""
    numbers = _numbers(seed)
    return [
        Task(f"{number}>", "".join(sorted(number))) for number, _ in zip(numbers, range(size or 4000), strict=False)
    ]


def pairs(*, size: int | None, seed: int) -> list[Task]:
    """Return `size` pairs of a sorted and a nearly sorted answer."""
    source = random.Random(seed + 1)  # noqa: S311 not a secret
    found: list[Task] = []
    for number in _numbers(seed):
        right = sorted(number)
        places = [i for i in range(DIGITS - 1) if right[i] != right[i + 1]]
        if places:
            i = source.choice(places)
            wrong = [*right[:i], right[i + 1], right[i], *right[i + 2 :]]
            found.append(Task(f"{number}>", metadata={"chosen": "".join(right), "rejected": "".join(wrong)}))
        if len(found) == (size or 4000):
            break
    return found


def _numbers(seed: int) -> Iterator[str]:
    source = random.Random(seed)  # noqa: S311 not a secret
    while True:
        yield "".join(source.choices("0123456789", k=DIGITS))

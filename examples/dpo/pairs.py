"""Pairs that turn the order around: "9530" is chosen and "0359" rejected for "5039>"."""

from __future__ import annotations

import random

from relax_actors.data.task import Task

DIGITS = 4


def make(*, size: int | None, seed: int) -> list[Task]:
    """Return pairs for `size` random numbers whose digits are not all the same."""
    source = random.Random(seed)  # noqa: S311 not a secret
    pairs: list[Task] = []
    while len(pairs) < (size or 10_000):
        number = "".join(source.choices("0123456789", k=DIGITS))
        rising = "".join(sorted(number))
        if rising != rising[::-1]:
            pairs.append(Task(f"{number}>", metadata={"chosen": rising[::-1], "rejected": rising}))
    return pairs

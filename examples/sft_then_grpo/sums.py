"""Sums and differences of two numbers of two digits; no held-out problem is trained."""

from __future__ import annotations

import random

from relax_actors import Task

HELD_OUT = 2000
"""Of the 16,200 problems in random order, the first ones are held out."""


def examples(*, size: int | None, seed: int) -> list[Task]:
    """Return `size` problems to train on, in an order that follows from the seed."""
    source = random.Random(seed)  # noqa: S311 not a secret
    return source.sample(_problems()[HELD_OUT:], size or 2000)


def held_out(*, size: int | None, seed: int) -> list[Task]:
    """Return `size` problems that `examples` never returns."""
    del seed
    return _problems()[: min(size or HELD_OUT, HELD_OUT)]


def _problems() -> list[Task]:
    found = [
        Task(f"Calculate {a} {sign} {b}.", str(a + b if sign == "+" else a - b), {"operation": name})
        for a in range(10, 100)
        for b in range(10, 100)
        for sign, name in (("+", "sum"), ("-", "difference"))
    ]
    random.Random(0).shuffle(found)  # noqa: S311 not a secret
    return found

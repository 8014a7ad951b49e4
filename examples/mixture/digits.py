"""Rows of a function, as objects with fields: sort four digits, "5039>" to "0359"."""

from __future__ import annotations

import random


def make(*, size: int | None, seed: int) -> list[dict[str, str]]:
    """Return `size` random numbers of four digits; the answer has the digits in ascending order."""
    source = random.Random(seed)  # noqa: S311 not a secret
    numbers = ["".join(source.choices("0123456789", k=4)) for _ in range(size or 1000)]
    return [{"prompt": f"{number}>", "answer": "".join(sorted(number))} for number in numbers]

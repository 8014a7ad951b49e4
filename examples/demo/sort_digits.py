"""Task of the demo: sort the digits of a number, "5039>" to "0359#"."""

from __future__ import annotations

import random

from relax_actors.data.task import Task

DIGITS = 4


def make(*, size: int | None, seed: int, digits: int = DIGITS) -> list[Task]:
    """Return `size` random numbers of `digits` digits; the answer has the digits in ascending order."""
    source = random.Random(seed)  # noqa: S311 not a secret
    numbers = ("".join(source.choices("0123456789", k=digits)) for _ in range(size or 10_000))
    return [Task(f"{number}>", "".join(sorted(number))) for number in numbers]

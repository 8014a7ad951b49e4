"""The demo's task: sort the digits of a number, "5039>" -> "0359#"."""

from __future__ import annotations

import random

from relax_actors.data.task import Task

DIGITS = 4


def make(*, size: int | None, seed: int, digits: int = DIGITS) -> list[Task]:
    """`size` random numbers of `digits` digits; the answer has them in ascending order."""
    source = random.Random(seed)  # noqa: S311 no secret
    numbers = ("".join(source.choices("0123456789", k=digits)) for _ in range(size or 10_000))
    return [Task(f"{number}>", "".join(sorted(number))) for number in numbers]

"""Task of `modes.py`: sort the digits of numbers whose lengths have a long tail."""

from __future__ import annotations

import random

from relax_actors.data.task import Task

MEDIAN, SIGMA, LONGEST = 4.0, 0.7, 24


def make(*, size: int | None, seed: int) -> list[Task]:
    """Return `size` random numbers with a log-normal number of digits, from 1 to 24."""
    source = random.Random(seed)  # noqa: S311 not a secret
    lengths = (min(LONGEST, max(1, round(MEDIAN * source.lognormvariate(0, SIGMA)))) for _ in range(size or 10_000))
    numbers = ("".join(source.choices("0123456789", k=length)) for length in lengths)
    return [Task(f"{number}>", "".join(sorted(number))) for number in numbers]

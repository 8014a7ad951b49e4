"""Copy three digits, "507>" to "507": tasks of the policy, and graded answers that its judge learns from."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from itertools import islice

from relax_actors import Task

LENGTH, DIGITS = 3, "01234567"
PARTS = 8
"""Parts of all numbers, of which one is held out: neither judge nor policy sees it in training."""


def tasks(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return `size` random numbers to copy."""
    source = random.Random(seed)  # noqa: S311 not a secret
    return [Task(f"{number}>", number) for number in islice(_numbers(source, held_out=held_out), size or 4000)]


def grades(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return `size` examples of a judge: what it reads about an answer, and its grade from 0 to 3."""
    source = random.Random(seed + 1)  # noqa: S311 not a secret
    found = []
    for task in tasks(size=size, seed=seed, held_out=held_out):
        answer = proposal(task.answer, source)
        found.append(Task(f'{task.prompt}"{answer}"', str(grade(answer, task.answer))))
    return found


def proposal(right: str, source: random.Random) -> str:
    """Return an answer of up to four digits, any number of which are wrong.

    Some repeat a digit or have the right digits in another order: a policy finds whatever its judge has not seen.
    """
    share = source.choice((0.0, source.random(), 1.0))
    length = source.choice((LENGTH, LENGTH, source.randint(0, LENGTH + 1)))
    wrong = source.choice((DIGITS, source.choice(DIGITS), right))
    given = f"{right}{source.choice(DIGITS)}"
    return "".join(own if source.random() < share else source.choice(wrong) for own in given[:length])


def grade(answer: str, right: str) -> int:
    """Return how many digits of an answer are right; 0 for an answer that is too long."""
    if len(answer) > len(right):
        return 0
    return sum(mine == other for mine, other in zip(answer, right, strict=False))


def _numbers(source: random.Random, *, held_out: bool) -> Iterator[str]:
    while True:
        number = "".join(source.choices(DIGITS, k=LENGTH))
        if (zlib.crc32(number.encode()) % PARTS == 0) == held_out:
            yield number

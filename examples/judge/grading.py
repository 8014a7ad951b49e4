"""Repeat the first of two digits three times, "73>" to "777": tasks of a policy, and graded answers for its judge."""

from __future__ import annotations

import random
import zlib

from relax_actors import Task

TIMES, DIGITS = 3, "0123456789"
PARTS = 8
"""Parts of all prompts, of which one is held out: neither judge nor policy sees it in training."""


def tasks(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return `size` random numbers, the first digit of each to be repeated three times."""
    source = random.Random(seed)  # noqa: S311 not a secret
    numbers = [f"{one}{other}" for one in DIGITS for other in DIGITS]
    own = [number for number in numbers if (zlib.crc32(number.encode()) % PARTS == 0) == held_out]
    return [Task(f"{number}>", number[0] * TIMES) for number in source.choices(own, k=size or 4000)]


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

    Half of the answers repeat one wrong digit: a policy finds whatever its judge has not seen.
    """
    share = source.choice((0.0, source.random(), 1.0))
    length = source.choice((TIMES, TIMES, source.randint(0, TIMES + 1)))
    wrong = source.choice((DIGITS, source.choice(DIGITS)))
    return "".join(right[0] if source.random() < share else source.choice(wrong) for _ in range(length))


def grade(answer: str, right: str) -> int:
    """Return how many digits of an answer are right; 0 for an answer that is too long."""
    if len(answer) > len(right):
        return 0
    return sum(mine == other for mine, other in zip(answer, right, strict=False))

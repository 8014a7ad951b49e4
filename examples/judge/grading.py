"""Repeat the first of two digits three times, "73>" to "777": tasks of a policy, and graded answers for its judge."""

from __future__ import annotations

import random
import zlib

from relax_actors import Task

TIMES, DIGITS = 3, "0123456789"
PARTS = 8
"""Parts of all prompts, of which one is held out: neither judge nor policy sees it in training."""


def tasks(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return `size` random numbers, whose first digit is to be repeated; `held_out` ones are never trained."""
    own = _numbers(held_out=held_out)
    drawn = own[:size] if held_out else _drawn(own, size, seed)
    return [Task(f"{number}>", number[0] * TIMES) for number in drawn]


def grades(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return `size` examples of a judge: what it reads about an answer, and its grade from 0 to 3."""
    source = random.Random(seed + 1)  # noqa: S311 not a secret
    found = []
    for number in _drawn(_numbers(held_out=held_out), size, seed):
        right = number[0] * TIMES
        answer = proposal(right, source)
        found.append(Task(f'{number}>"{answer}"', str(grade(answer, right))))
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


def _numbers(*, held_out: bool) -> list[str]:
    numbers = [f"{one}{other}" for one in DIGITS for other in DIGITS]
    return [number for number in numbers if (zlib.crc32(number.encode()) % PARTS == 0) == held_out]


def _drawn(numbers: list[str], size: int | None, seed: int) -> list[str]:
    return random.Random(seed).choices(numbers, k=size or 4000)  # noqa: S311 not a secret

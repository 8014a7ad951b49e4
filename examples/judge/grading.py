"""Repeat a digit three times, "7>" to "777": tasks of the policy, and graded answers that its judge learns from."""

from __future__ import annotations

import random

from relax_actors import Task

TIMES, DIGITS = 3, "01234567"


def tasks(*, size: int | None, seed: int) -> list[Task]:
    """Return `size` random digits, each to be repeated three times."""
    source = random.Random(seed)  # noqa: S311 not a secret
    return [Task(f"{digit}>", digit * TIMES) for digit in source.choices(DIGITS, k=size or 4000)]


def grades(*, size: int | None, seed: int) -> list[Task]:
    """Return `size` examples of a judge: what it reads about an answer, and its grade from 0 to 3."""
    source = random.Random(seed + 1)  # noqa: S311 not a secret
    found = []
    for task in tasks(size=size, seed=seed):
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

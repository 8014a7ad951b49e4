"""Repeat a digit: "7>" to "7777". The better of two answers has more of its characters right."""

from __future__ import annotations

import random

from relax_actors import Task

LENGTH, LONGEST = 4, 5
CHARACTERS = "0123456789>"
"""What a policy may write: it finds answers that a reward model scores highly because no pair had any like them."""


def make(*, size: int | None, seed: int) -> list[Task]:
    """Return random digits to repeat, with the answers that a rule compares with."""
    source = random.Random(seed)  # noqa: S311 not a secret
    return [Task(f"{digit}>", digit * LENGTH) for digit in source.choices("0123456789", k=size or 1000)]


def pairs(*, size: int | None, seed: int) -> list[Task]:
    """Return pairs of answers, of which the chosen one is better."""
    source = random.Random(seed)  # noqa: S311 not a secret
    found: list[Task] = []
    while len(found) < (size or 10_000):
        digit = source.choice("0123456789")
        worse, better = sorted((_answer(digit, source) for _ in range(2)), key=lambda text: quality(text, digit))
        if quality(worse, digit) < quality(better, digit):
            found.append(Task(f"{digit}>", metadata={"chosen": better, "rejected": worse}))
    return found


def quality(answer: str, digit: str) -> float:
    """Return the share of right characters, of the answer or of the right one if that is longer."""
    return answer[:LENGTH].count(digit) / max(len(answer), LENGTH)


def _answer(digit: str, source: random.Random) -> str:
    """Return an answer of random length, with a random number of copies of a digit."""
    share, length = source.random(), source.randint(1, LONGEST)
    return "".join(digit if source.random() < share else source.choice(CHARACTERS) for _ in range(length))

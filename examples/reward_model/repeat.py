"""Repeat a number, "507>" to "507". The better of two answers has more of its characters right."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from itertools import islice

from relax_actors import Task

LENGTH, LONGEST = 3, 4
CHARACTERS = "0123456789>"
"""What a policy may write: it finds answers that a reward model scores highly because no pair had any like them."""
PARTS = 8
"""Parts of all numbers, of which one is held out: training never sees it."""


def make(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return random numbers to repeat, with the answers that a rule compares with."""
    source = random.Random(seed)  # noqa: S311 not a secret
    return [Task(f"{number}>", number) for number in islice(_numbers(source, held_out=held_out), size or 1000)]


def pairs(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return pairs of answers, of which the chosen one is better."""
    source = random.Random(seed)  # noqa: S311 not a secret
    found: list[Task] = []
    for number in _numbers(source, held_out=held_out):
        answers = (_answer(number, source) for _ in range(2))
        worse, better = sorted(answers, key=lambda text: quality(text, number))
        if quality(worse, number) < quality(better, number):
            found.append(Task(f"{number}>", metadata={"chosen": better, "rejected": worse}))
        if len(found) == (size or 10_000):
            break
    return found


def quality(answer: str, number: str) -> float:
    """Return the share of right characters, of the answer or of the right one if that is longer."""
    right = sum(mine == other for mine, other in zip(answer, number, strict=False))
    return right / max(len(answer), LENGTH)


def _answer(number: str, source: random.Random) -> str:
    """Return an answer of random length, with a random number of right characters."""
    share, length = source.random(), source.randint(1, LONGEST)
    right = f"{number}{source.choice(CHARACTERS)}"
    return "".join(own if source.random() < share else source.choice(CHARACTERS) for own in right[:length])


def _numbers(source: random.Random, *, held_out: bool) -> Iterator[str]:
    while True:
        number = "".join(source.choices("0123456789", k=LENGTH))
        if (zlib.crc32(number.encode()) % PARTS == 0) == held_out:
            yield number

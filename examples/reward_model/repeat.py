"""Repeat the first of two digits: "73>" to "7777". The better of two answers has more of its characters right."""

from __future__ import annotations

import random
import zlib

from relax_actors import Task

LENGTH, LONGEST = 4, 5
CHARACTERS = "0123456789>"
"""What a policy may write: it finds answers that a reward model scores highly because no pair had any like them."""


PARTS = 8
"""Parts of all prompts, of which one is held out: training never sees it."""


def make(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return random numbers with the answers that a rule compares with."""
    source = random.Random(seed)  # noqa: S311 not a secret
    own = _numbers(held_out=held_out)
    drawn = own[:size] if held_out else source.choices(own, k=size or 1000)
    return [Task(f"{number}>", number[0] * LENGTH) for number in drawn]


def pairs(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return pairs of answers, of which the chosen one is better."""
    source = random.Random(seed)  # noqa: S311 not a secret
    numbers, found = _numbers(held_out=held_out), list[Task]()
    while len(found) < (size or 10_000):
        number = source.choice(numbers)
        digit = number[0]
        worse, better = sorted((_answer(digit, source) for _ in range(2)), key=lambda text: quality(text, digit))
        if quality(worse, digit) < quality(better, digit):
            found.append(Task(f"{number}>", metadata={"chosen": better, "rejected": worse}))
    return found


def quality(answer: str, digit: str) -> float:
    """Return the share of right characters, of the answer or of the right one if that is longer."""
    return answer[:LENGTH].count(digit) / max(len(answer), LENGTH)


def _numbers(*, held_out: bool) -> list[str]:
    numbers = [f"{number:02}" for number in range(100)]
    return [number for number in numbers if (zlib.crc32(number.encode()) % PARTS == 0) == held_out]


def _answer(digit: str, source: random.Random) -> str:
    """Return an answer of random length, with a random number of copies of a digit."""
    share, length = source.random(), source.randint(1, LONGEST)
    return "".join(digit if source.random() < share else source.choice(CHARACTERS) for _ in range(length))

"""Copy a number of two digits, "73>" to "73". The better of two answers has more of its characters right."""

from __future__ import annotations

import random
import zlib

from relax_actors import Task

DIGITS, LENGTH, LONGEST = "0123456789", 2, 3
CHARACTERS = f"{DIGITS}>"
"""What a policy may write: it finds answers that a reward model scores highly because no pair had any like them."""
PARTS = 8
"""Parts of all numbers, of which one is held out: no prompt with such a number is trained."""


def make(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return numbers to copy, with the answers that a rule compares with; `held_out` ones are never trained."""
    own = _numbers(held_out=held_out)
    drawn = own[:size] if held_out else random.Random(seed).choices(own, k=size or 1000)  # noqa: S311 not a secret
    return [Task(f"{number}>", number) for number in drawn]


def pairs(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return pairs of answers, of which the chosen one is better."""
    source, own = random.Random(seed), _numbers(held_out=held_out)  # noqa: S311 not a secret
    found: list[Task] = []
    while len(found) < (size or 10_000):
        number = source.choice(own)
        worse, better = sorted((_answer(number, source) for _ in range(2)), key=lambda text: quality(text, number))
        if quality(worse, number) < quality(better, number):
            found.append(Task(f"{number}>", metadata={"chosen": better, "rejected": worse}))
    return found


def quality(answer: str, number: str) -> float:
    """Return the share of right characters, of the answer or of the right one if that is longer."""
    same = sum(mine == right for mine, right in zip(answer, number, strict=False))
    return same / max(len(answer), LENGTH)


def _answer(number: str, source: random.Random) -> str:
    """Return an answer of random length; wrong characters are any, or digits of the number."""
    share, length = source.random(), source.randint(1, LONGEST)
    wrong = source.choice((CHARACTERS, number))
    return "".join(number[i] if i < LENGTH and source.random() < share else source.choice(wrong) for i in range(length))


def _numbers(*, held_out: bool) -> list[str]:
    numbers = [f"{number:0{LENGTH}}" for number in range(10**LENGTH)]
    return [number for number in numbers if (zlib.crc32(number.encode()) % PARTS == 0) == held_out]

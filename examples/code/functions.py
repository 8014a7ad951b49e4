"""Write a function of one line, "add 37>" to "def f(x):return x+37"; tests decide whether it is right."""

from __future__ import annotations

import random
import zlib

from relax_actors import Task

SIGNS = {"add": "+", "sub": "-", "mul": "*"}
NUMBERS = range(10, 100)
PARTS = 8
"""Parts of all numbers, of which one is held out: no function with such a number is trained, in either stage."""
ARGUMENTS = (1, 7)
"""Arguments that the tests of a function use."""


def make(*, size: int | None, seed: int, held_out: bool = False, mistakes: float = 0.0) -> list[Task]:
    """Return `size` functions to write, with tests and an example of the code, which no reward reads.

    A share of `mistakes` of the examples computes something else, as code that people collect does. No held-out
    function occurs twice; there are at most `size`.
    """
    source = random.Random(seed)  # noqa: S311 not a secret
    numbers = [number for number in NUMBERS if (zlib.crc32(f"{number}".encode()) % PARTS == 0) == held_out]
    every = [(name, number) for number in numbers for name in SIGNS]
    drawn = every[:size] if held_out else source.choices(every, k=size or 4000)
    return [_task(name, number, _sign(name, mistakes, source)) for name, number in drawn]


def result(name: str, value: int, number: int) -> int:
    """Return what the function of a task gives for an argument."""
    return {"add": value + number, "sub": value - number, "mul": value * number}[name]


def _task(name: str, number: int, sign: str) -> Task:
    tests = [f"assert f({value}) == {result(name, value, number)}" for value in ARGUMENTS]
    return Task(f"{name} {number}>", f"def f(x):return x{sign}{number}", {"tests": tests})


def _sign(name: str, mistakes: float, source: random.Random) -> str:
    """Return the sign of an operation, or with a probability of `mistakes` that of another operation."""
    wrong = [sign for other, sign in SIGNS.items() if other != name]
    return source.choice(wrong) if source.random() < mistakes else SIGNS[name]

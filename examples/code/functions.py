"""Write a function of one line, "add 37>" to "def f(x):return x+37"; tests decide whether it is right."""

from __future__ import annotations

import random
import zlib

from relax_actors import Task

SIGNS = {"add": "+", "sub": "-", "mul": "*"}
NUMBERS = range(10, 100)
PARTS = 8
"""Parts of all tasks, of which one is held out: training never sees it."""
ARGUMENTS = (0, 1, 7)
"""Arguments that the tests of a function use."""


def make(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return `size` tasks with tests; their answers are examples for the first stage, which no reward reads."""
    source = random.Random(seed)  # noqa: S311 not a secret
    every = [(name, number) for name in SIGNS for number in NUMBERS]
    own = [each for each in every if (zlib.crc32(f"{each}".encode()) % PARTS == 0) == held_out]
    drawn = own[:size] if held_out else source.choices(own, k=size or 4000)
    return [task(*each) for each in drawn]


def task(name: str, number: int) -> Task:
    """Return a task: what `f` does with its argument, an example of its code, and what it gives for some arguments."""
    tests = [f"assert f({value}) == {result(name, value, number)}" for value in ARGUMENTS]
    return Task(f"{name} {number}>", f"def f(x):return x{SIGNS[name]}{number}", {"tests": tests})


def result(name: str, value: int, number: int) -> int:
    """Return what the function of a task gives for an argument."""
    return {"add": value + number, "sub": value - number, "mul": value * number}[name]

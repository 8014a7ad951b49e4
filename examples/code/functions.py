"""Write a function of one line, "add 3>" to "def f(x):return x+3"; tests decide whether it is right."""

from __future__ import annotations

import random

from relax_actors import Task

SIGNS = {"add": "+", "sub": "-", "mul": "*"}
NUMBERS = "23456789"
ARGUMENTS = (0, 1, 7)
"""Arguments that the tests of a function use."""


def make(*, size: int | None, seed: int) -> list[Task]:
    """Return `size` tasks with tests; their answers are examples for the first stage, which no reward reads."""
    source = random.Random(seed)  # noqa: S311 not a secret
    return [task(source.choice([*SIGNS]), int(source.choice(NUMBERS))) for _ in range(size or 4000)]


def task(name: str, number: int) -> Task:
    """Return a task: what `f` does with its argument, an example of its code, and what it gives for some arguments."""
    tests = [f"assert f({value}) == {result(name, value, number)}" for value in ARGUMENTS]
    return Task(f"{name} {number}>", f"def f(x):return x{SIGNS[name]}{number}", {"tests": tests})


def result(name: str, value: int, number: int) -> int:
    """Return what the function of a task gives for an argument."""
    return {"add": value + number, "sub": value - number, "mul": value * number}[name]

"""Multiply with a tool: "71*26?" -> "(71*26)" -> the calculator shows "1846:" -> "=1846"."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_actors import Environment, Step, Task

CALL = re.compile(r"\((\d{1,4})\*(\d{1,4})\)")


class Calculator(Environment):
    """Computes what the model writes in parentheses; an answer that begins with "=" ends the episode."""

    def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Begin with the question of the prompt."""
        del rng
        self.answer, self.calls = task["answer"].rpartition("=")[2], 0
        return ""

    def step(self, action: str) -> Step:
        """Run a call, or judge an answer."""
        call = CALL.fullmatch(action)
        if call is None:
            return Step(reward=float(action == f"={self.answer}"), done=True, metrics={"calls": self.calls})
        self.calls += 1
        return Step(f"{int(call[1]) * int(call[2])}:", metrics={"calls": self.calls})


def make(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return tasks; every second answer calls the tool, the others go without it to a guess.

    An eighth of all questions is held out: `held_out` draws from these alone, and training never sees them.
    """
    source = random.Random(seed)  # noqa: S311 not a secret
    return [_task(source, i, held_out=held_out) for i in range(size or 10_000)]


def _task(source: random.Random, index: int, *, held_out: bool) -> Task:
    a, b = source.randint(10, 99), source.randint(10, 99)
    while (zlib.crc32(f"{a}*{b}".encode()) % 8 == 0) != held_out:
        a, b = source.randint(10, 99), source.randint(10, 99)
    call = f"({a}*{b}).{a * b}:" if index % 2 else ""
    return Task(f"{a}*{b}?", f"{call}={a * b}")

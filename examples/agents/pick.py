"""Sort by turns: "61408:" is answered by the smallest digit that is left, then the environment shows the rest."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_actors import Environment, Prompt, Step, Task

DIGITS = 5
END = "."


class Pick(Environment):
    """Pick the smallest digit that is left. A wrong one earns nothing; the right one is removed, and it goes on."""

    def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Begin with the digits of the prompt."""
        del rng
        self.left = list(task["prompt"].rstrip(":"))
        return ""

    def step(self, action: str) -> Step:
        """Take one digit."""
        smallest = min(self.left)
        self.left.remove(smallest)
        reward = 1 / DIGITS if action == smallest else 0.0
        return Step("".join(self.left) + ":", reward, done=not self.left)


def make(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return tasks; the answer is an episode of random picks, which shows the format and not the task.

    An eighth of all rows of digits is held out: `held_out` draws from these alone, and training never sees them.
    """
    source = random.Random(seed)  # noqa: S311 not a secret
    return [_task(source, held_out=held_out) for _ in range(size or 10_000)]


def _task(source: random.Random, *, held_out: bool) -> Task:
    left = source.sample("0123456789", k=DIGITS)
    while (zlib.crc32("".join(left).encode()) % 8 == 0) != held_out:
        left = source.sample("0123456789", k=DIGITS)
    prompt, answer = "".join(left) + ":", ""
    while left:
        answer += source.choice(left)
        left.remove(min(left))
        answer += END + "".join(left) + ":" if left else ""
    return Task(prompt, answer)


def all_right(completion: str, prompt: Prompt) -> float:
    """Whether every pick of an episode was right."""
    return float(completion == "".join(sorted(prompt.text.rstrip(":"))))

"""Solver and critic, played by one model: the solver sorts by turns, and the critic judges each of its picks.

The solver sees "6140:", "640:" after a pick, and so on; the critic "6140?0=", "640?6=" and so on.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_actors import Environment, Step, Task

DIGITS = 4
END = "."


class Review(Environment):
    """The solver picks the smallest digit that is left; the critic says "+" if the pick is right, and else "-".

    Whatever they say, the right digit is removed, and it goes on. Both get a share for each right turn.
    """

    def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Begin with the digits of the prompt, which both see."""
        del rng
        self.left, self.pick = list(task["prompt"]), ""
        return ":"

    def step(self, action: str) -> Step:
        """Take a pick of the solver, or a judgement of the critic."""
        if not self.pick:
            self.pick = action[:1] or "-"
            shown = "" if len(self.left) == DIGITS else "".join(self.left)
            return Step(f"{shown}?{self.pick}=", player="critic")
        smallest = min(self.left)
        self.left.remove(smallest)
        is_right, self.pick = self.pick == smallest, ""
        agrees = action == ("+" if is_right else "-")
        reward = {"solver": is_right / DIGITS, "critic": agrees / DIGITS}
        return Step("".join(self.left) + ":", reward, done=not self.left, player="solver")


def make(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return tasks; the answer is what one of the two sees and says at random, which shows the format alone.

    An eighth of all rows of digits is held out: `held_out` draws from these alone, and training never sees them.
    """
    source = random.Random(seed)  # noqa: S311 not a secret
    return [_task(source, held_out=held_out) for _ in range(size or 10_000)]


def _task(source: random.Random, *, held_out: bool) -> Task:
    left = source.sample("0123456789", k=DIGITS)
    while (zlib.crc32("".join(left).encode()) % 8 == 0) != held_out:
        left = source.sample("0123456789", k=DIGITS)
    prompt, answer, is_critic = "".join(left), "", source.random() < 0.5
    while left:
        shown, pick = "" if len(left) == DIGITS else "".join(left), source.choice(left)
        answer += f"{shown}?{pick}={source.choice('+-')}{END}" if is_critic else f"{shown}:{pick}{END}"
        left.remove(min(left))
    return Task(prompt, answer.removesuffix(END))

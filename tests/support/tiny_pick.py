"""Environment of tests: sort digits, one a turn."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from relax_actors.data.task import Task
from relax_actors.envs import Environment, Step


class Pick(Environment):
    """Pick the smallest digit that is left; a wrong one earns nothing, and the right one is removed.

    `pause` is the longest time of a step in seconds.
    """

    pause: float = 0.0

    def reset(self, task: Any, rng: np.random.Generator) -> str:
        self.left = sorted(task["prompt"].rstrip(">"))
        self.turns, self.rng = len(self.left), rng
        return ""

    def step(self, action: str) -> Step:
        time.sleep(self.pause * self.rng.random())
        reward = float(action[:1] == self.left.pop(0)) / self.turns
        return Step("".join(self.left) + ">", reward=reward, done=not self.left)


def make(*, size: int | None, seed: int) -> list[Task]:
    """Make tasks of four different digits."""
    rng = np.random.default_rng(seed)
    return [Task("".join(map(str, rng.permutation(10)[:4])) + ">", str(i)) for i in range(size or 100)]


class Sevens(Environment):
    """Three turns; an action earns its share of sevens. `pause` is the longest time of a step in seconds."""

    pause: float = 0.0

    def reset(self, task: Any, rng: np.random.Generator) -> str:
        del task
        self.taken, self.rng = 0, rng
        return "begin"

    def step(self, action: str) -> Step:
        time.sleep(self.pause * self.rng.random())
        self.taken += 1
        return Step(f"{self.taken}", reward=action.count("7") / max(1, len(action)), done=self.taken == 3)

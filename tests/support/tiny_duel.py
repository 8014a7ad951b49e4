"""Environment of tests with two players: one sorts digits, the other one judges each pick."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from relax_actors.envs import Environment, Step


class Duel(Environment):
    """The solver picks the smallest digit that is left; the critic sees the pick, and says 1 if it is right, else 0.

    `pause` is the longest time of a step in seconds.
    """

    pause: float = 0.0

    def reset(self, task: Any, rng: np.random.Generator) -> str:
        self.left = sorted(task["prompt"].rstrip(">"))
        self.share, self.rng, self.pick = 1 / len(self.left), rng, ""
        return ""

    def step(self, action: str) -> Step:
        time.sleep(self.pause * self.rng.random())
        if not self.pick:
            self.pick = action[:1] or "#"
            return Step(f"{self.pick}#>", player="critic")
        right, self.pick = self.pick == self.left.pop(0), ""
        judged = action[:1] == str(int(right))
        reward = {"solver": self.share * right, "critic": self.share * judged - self.share * right}
        return Step("".join(self.left) + ">", reward, done=not self.left, player="solver")

"""Environment `reasoning_gym`: several attempts at a task, scored by reasoning-gym."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from relax_actors.envs.environment import Environment, Step
from relax_actors.messages import Prompt
from relax_actors.rewards import reasoning_gym_score
from relax_actors.rewards._reasoning_gym import package


class ReasoningGymEnvironment(Environment):
    """Scores each answer; one below `enough` gets `again` until the attempts are used up.

    The tasks come from the data: set `data.kind = "reasoning_gym"`.

    Attributes:
        attempts: number of answers.
        enough: score that ends the episode.
        again: what the model is told otherwise; `{score}` and `{left}` are replaced.
    """

    attempts: Annotated[int, Field(gt=0)] = 3
    enough: float = 1.0
    again: str = "That is not right. Try again."

    _left: int
    _prompt: Prompt

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check that reasoning-gym is installed; raises ConfigError if it is not."""
        del options
        package()

    def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Begin with the question, which is the data's prompt."""
        del rng
        self._left = self.attempts
        text = str(task["prompt"])
        self._prompt = Prompt(text, np.zeros(0, np.int32), str(task["answer"]), dict(task["metadata"]), 0, 0)
        return ""

    def step(self, action: str) -> Step:
        """Score an answer."""
        self._left -= 1
        score = reasoning_gym_score(action, self._prompt)
        if score >= self.enough or not self._left:
            return Step(reward=score, done=True, metrics={"attempts": self.attempts - self._left})
        return Step(self.again.format(score=score, left=self._left))

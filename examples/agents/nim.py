"""Nim against oneself: take one to three stones by turns; who takes the last one wins."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_actors.data.task import Task
from relax_actors.envs import Environment, Step
from relax_actors.messages import Prompt, Sample

MOST_STONES, MOST_TAKEN = 12, 3
END = "."
OTHER = {"first": "second", "second": "first"}


class Nim(Environment):
    """The model plays both sides. Each side sees the stones that the other one has left, and its own moves."""

    def reset(self, task: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Begin with the stones of the prompt, which both sides see."""
        del rng
        self.left, self.player = int(task["prompt"].rstrip(":")), "first"
        return ""

    def step(self, action: str) -> Step:
        """Take stones; an impossible move loses."""
        taken, other = taken_by(action, self.left), OTHER[self.player]
        self.left -= taken
        if taken and self.left:
            self.player = other
            return Step(f"{self.left}:", player=other)
        winner, loser = (self.player, other) if taken else (other, self.player)
        return Step(reward={winner: 1.0, loser: -1.0}, done=True)


def taken_by(action: str, left: int) -> int:
    """Return how many stones a move takes; 0 if it is impossible."""
    taken = int(action) if action in ("1", "2", "3") else 0
    return taken if taken <= left else 0


def make(*, size: int | None, seed: int) -> list[Task]:
    """Return tasks; the answer is what one side writes and sees while both play at random, to show the format."""
    source = random.Random(seed)  # noqa: S311 not a secret
    return [_task(source) for _ in range(size or 10_000)]


def _task(source: random.Random) -> Task:
    stones = left = source.randint(2, MOST_STONES)
    answer = ""
    while left:
        taken = source.randint(1, min(MOST_TAKEN, left))
        left -= taken
        answer += f"{taken}{END}"
        left -= source.randint(1, min(MOST_TAKEN, left)) if left else 0
        answer += f"{left}:" if left else ""
    return Task(f"{stones}:", answer.removesuffix(END))


def best_moves(completion: str, prompt: Prompt, sample: Sample) -> float:
    """Share of the winnable positions of an episode in which the move left a multiple of 4, which wins."""
    del completion
    left, found = int(prompt.text.rstrip(":")), []
    for message in sample.messages:
        if message["role"] == "assistant":
            taken = taken_by(message["content"], left)
            if left % (MOST_TAKEN + 1):
                found.append(taken == left % (MOST_TAKEN + 1))
            left -= taken
    return sum(found) / len(found) if found else 1.0

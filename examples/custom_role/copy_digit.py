"""The example's task: repeat a digit, "7>" -> "7#", and the longer the answer the worse."""

from __future__ import annotations

import random

from relax_actors.data.task import Task
from relax_actors.messages import Prompt


def make(*, size: int | None, seed: int) -> list[Task]:
    """`size` random digits."""
    source = random.Random(seed)  # noqa: S311 no secret
    return [Task(f"{digit}>", digit) for digit in source.choices("0123456789", k=size or 1000)]


def starts_right(completion: str, prompt: Prompt) -> float:
    """Whether the completion begins with the answer; its length is the penalty's business."""
    return float(completion.startswith(prompt.answer))

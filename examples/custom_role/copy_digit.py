"""Task and reward of the example: repeat a digit, "7>" to "7#", with as few tokens as possible."""

from __future__ import annotations

import random

from relax_actors import Prompt, Task


def make(*, size: int | None, seed: int) -> list[Task]:
    """Return `size` random digits; 1,000 if `size` is not set."""
    source = random.Random(seed)  # noqa: S311 not a secret
    return [Task(f"{digit}>", digit) for digit in source.choices("0123456789", k=size or 1000)]


def starts_right(completion: str, prompt: Prompt) -> float:
    """Return 1 if the completion starts with the answer; the penalty handles its length."""
    return float(completion.startswith(prompt.answer))

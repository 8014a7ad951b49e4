"""A custom reward: the nearer the last number of a completion to the answer, the better."""

from __future__ import annotations

import re

from relax_actors import Prompt


def closeness(completion: str, prompt: Prompt) -> float:
    """Return 1 for the right number, less for others, and 0 without a number."""
    numbers = re.findall(r"-?\d{1,12}", completion)
    if not numbers:
        return 0.0
    answer = float(prompt.answer)
    return 1.0 / (1.0 + abs(float(numbers[-1]) - answer) / max(1.0, abs(answer)) * 10.0)

"""Task of the demo without the ">" at the end of its prompts: sort the digits of "5039"."""

from __future__ import annotations

import sys
from pathlib import Path

from relax_actors import Task

sys.path.append(str(Path(__file__).parents[1] / "demo"))

import sort_digits


def make(*, size: int | None, seed: int, held_out: bool = False) -> list[Task]:
    """Return `size` random numbers of four digits; the answer has the digits in ascending order."""
    numbers = sort_digits.make(size=size, seed=seed, held_out=held_out)
    return [Task(prompt.removesuffix(">"), answer) for prompt, answer in numbers]

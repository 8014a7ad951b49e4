"""What engines that train or score are given: tokens, in NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sequences:
    """Prompts with completions, one entry a sample: `prompts[i] [prompt_len] int32`, `completions[i] [len] int32`.

    `experts[i] [prompt_len + len - 1, moe_layers, experts_of_token] int16` are those to compute with, -1 for the
    router's own choice; None if that is it everywhere.
    """

    prompts: Sequence[NDArray[Any]]
    completions: Sequence[NDArray[Any]]
    experts: Sequence[NDArray[Any]] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each, prompt and completion together."""
        return [len(p) + len(c) for p, c in zip(self.prompts, self.completions, strict=True)]

    def cut(self, counts: Sequence[int]) -> list[Sequences]:
        """Neighbours in groups of so many."""
        found, start = [], 0
        for count in counts:
            end = start + count
            experts = None if self.experts is None else self.experts[start:end]
            found.append(Sequences(self.prompts[start:end], self.completions[start:end], experts))
            start = end
        return found

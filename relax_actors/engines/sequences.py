"""What engines that train or score are given: tokens, in NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sequences:
    """Prompts with completions, one entry a sample: `prompts[i] [prompt_len] int32`, `completions[i] [len] int32`."""

    prompts: Sequence[NDArray[Any]]
    completions: Sequence[NDArray[Any]]

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
            found.append(Sequences(self.prompts[start:end], self.completions[start:end]))
            start = end
        return found

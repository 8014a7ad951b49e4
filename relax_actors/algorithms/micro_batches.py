"""Cuts the sequences of a step into micro-batches that fit a token budget.

The cut follows from the arguments alone: a trainer that replays a step after a crash adds its gradients up in the
same order and ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], *, token_budget: int) -> list[list[int]]:
    """Cut the indices of `lengths` so that, in each part, longest length times number of sequences fits the budget.

    Longest first, equal lengths in order of index: neighbours pad each other little, and what needs most memory runs
    first. The number of micro-batches is the least that any cut of the sorted lengths allows. Raises ValueError when
    a sequence is empty or longer than the budget.
    """
    for index, length in enumerate(lengths):
        if length < 1:
            msg = f"sequence {index} has length {length}; leave sequences without tokens out of the step"
            raise ValueError(msg)
        if length > token_budget:
            msg = (
                f"sequence {index} has length {length}, token_budget is {token_budget}; "
                f"raise token_budget to {length} or more, or allow shorter prompts and samples"
            )
            raise ValueError(msg)

    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if parts and lengths[parts[-1][0]] * (len(parts[-1]) + 1) <= token_budget:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts

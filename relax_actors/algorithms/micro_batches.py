"""Cuts the sequences of a step into micro-batches that fit a token budget.

The cut follows from the arguments alone: a trainer that replays a step after a crash adds its gradients up in the
same order and ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def micro_batches(lengths: Sequence[int], *, token_budget: int, padded: bool = False) -> list[list[int]]:
    """Cut the indices of `lengths` so that the lengths of each part add up to the budget at most.

    Longest first, equal lengths in order of index: attention, which computes on padding, pads neighbours little, and
    what needs most memory runs first. The number of micro-batches is the least that any cut of the sorted lengths
    allows. With `padded` all that a part has counts as long as its longest. Raises ValueError when a sequence is empty
    or longer than the budget.
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

    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    parts = _neighbours([lengths[i] for i in order], token_budget, padded=padded)
    return [[order[i] for i in part] for part in parts]


def row_parts(rows: Sequence[Sequence[int]], *, token_budget: int) -> list[range]:
    """Cut rows, given the lengths of their sequences, into parts that each fit a micro-batch; a row is never cut.

    A part ends where the next row does not fit into it, so a part that is followed by another stays what it is however
    many rows come after: it can be trained before they are there. A row that fits no micro-batch is a part of its own.
    """
    return _neighbours([sum(lengths) for lengths in rows], token_budget)


def _neighbours(sizes: Sequence[int], budget: int, *, padded: bool = False) -> list[range]:
    """Neighbours as many as fit; what does not fit at all stands alone. With `padded` sizes must not rise."""
    begins: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        total += sizes[begins[-1]] if padded and begins else size
        if not begins or total > budget:
            begins.append(i)
            total = size
    return [range(*ends) for ends in pairwise([*begins, len(sizes)])]

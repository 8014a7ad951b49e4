"""Cuts the sequences of a step into micro-batches that fit a token budget.

The cut follows from the arguments alone: a trainer that replays a step after a crash adds its gradients up in the
same order and ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


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


def row_parts(rows: Sequence[Sequence[int]], *, token_budget: int) -> list[range]:
    """Cut rows, given the lengths of their sequences, into parts that each fit a micro-batch; a row is never cut.

    A part ends where the next row does not fit into it, so a part that is followed by another stays what it is however
    many rows come after: it can be trained before they are there. A row that fits no micro-batch is a part of its own.
    """
    begins: list[int] = []
    longest = count = 0
    for i, lengths in enumerate(rows):
        longest, count = max(longest, *lengths), count + len(lengths)
        if not begins or longest * count > token_budget:
            begins.append(i)
            longest, count = max(lengths), len(lengths)
    return [range(*ends) for ends in pairwise([*begins, len(rows)])]

"""Split the sequences of a step into micro-batches of a limited number of tokens.

The split is a function of its arguments alone, so a trainer that replays a step after a crash adds up the gradients in
the same order and gets the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Shared:
    """Work that sequences of a group share within a micro-batch.

    Attributes:
        groups: group of each sequence.
        ranks: order of the sequences, within their group.
        prefixes: leading tokens that each sequence shares with its predecessor in its group; a micro-batch with both
            computes them once.
        least: tokens that each sequence counts at the least, since the logits of trained tokens are not shared.
        media: tokens of each medium that a sequence reads, by medium; counted once in each micro-batch.
    """

    groups: Sequence[int]
    ranks: Sequence[int]
    prefixes: Sequence[int]
    least: Sequence[int]
    media: Sequence[Mapping[int, int]]


def micro_batches(
    lengths: Sequence[int], *, max_tokens: int, padded: bool = False, shared: Shared | None = None
) -> list[list[int]]:
    """Split sequences into micro-batches of `max_tokens` tokens, longest first.

    Sequences of equal length keep the order of their indices. Neighbours have similar lengths, so attention, which
    computes on padding, wastes little, and the micro-batch that needs most memory runs first. No split of the sorted
    lengths has fewer micro-batches.

    Args:
        lengths: tokens of each sequence.
        max_tokens: largest number of tokens of a micro-batch.
        padded: whether each sequence counts as long as the longest one of its micro-batch.
        shared: work that groups of sequences share; a group's sequences then stay together, in their order, and the
            group with the longest sequence comes first. A sequence that exceeds the limit with its media is a
            micro-batch of its own.

    Returns:
        Indices into `lengths`, one list for each micro-batch.

    Raises:
        ValueError: a sequence is empty, or longer than `max_tokens`.
    """
    for index, length in enumerate(lengths):
        if length < 1:
            msg = f"sequence {index} has no tokens; leave empty sequences out of the step"
            raise ValueError(msg)
        if length > max_tokens:
            msg = (
                f"sequence {index} has {length} tokens; a micro-batch holds at most {max_tokens}. Raise "
                f"trainer.max_tokens_per_microbatch to {length} or more, or limit prompts and samples"
            )
            raise ValueError(msg)

    if shared is not None:
        return _grouped(lengths, shared, max_tokens)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    parts = _fill_in_order([lengths[i] for i in order], max_tokens, padded=padded)
    return [[order[i] for i in part] for part in parts]


def _grouped(lengths: Sequence[int], shared: Shared, max_tokens: int) -> list[list[int]]:
    longest: dict[int, int] = {}
    for group, length in zip(shared.groups, lengths, strict=True):
        longest[group] = max(length, longest.get(group, 0))
    order = sorted(range(len(lengths)), key=lambda i: (-longest[shared.groups[i]], shared.groups[i], shared.ranks[i]))
    groups: list[list[int]] = []
    total, present = 0, dict[int, int]()
    for i in order:
        added = {medium: tokens for medium, tokens in shared.media[i].items() if medium not in present}
        size = max(lengths[i] - shared.prefixes[i], shared.least[i]) + sum(added.values())
        if not groups or total + size > max_tokens:
            groups.append([])
            total, present = 0, {}
            added = dict(shared.media[i])
            size = lengths[i] + sum(added.values())
        groups[-1].append(i)
        total += size
        present |= added
    return groups


def group_work(lengths: Sequence[int], shared: Shared) -> dict[int, int]:
    """Return the tokens of each group in a single micro-batch."""
    work: dict[int, int] = {}
    media: dict[int, dict[int, int]] = {}
    for i, group in enumerate(shared.groups):
        work[group] = work.get(group, 0) + max(lengths[i] - shared.prefixes[i], shared.least[i])
        media.setdefault(group, {}).update(shared.media[i])
    return {group: tokens + sum(media[group].values()) for group, tokens in work.items()}


def split_rows(rows: Sequence[Sequence[int]], *, max_tokens: int) -> list[range]:
    """Split rows into consecutive parts that each fit one micro-batch, without splitting a row.

    A part ends where the next row does not fit. All parts but the last are therefore final, however many rows follow,
    and can be trained before the following rows arrive. A row above `max_tokens` is a part of its own.

    Args:
        rows: lengths of the sequences of each row.
        max_tokens: largest number of tokens of a micro-batch.

    Returns:
        Range of row indices of each part.
    """
    return _fill_in_order([sum(lengths) for lengths in rows], max_tokens)


def _fill_in_order(sizes: Sequence[int], limit: int, *, padded: bool = False) -> list[range]:
    """Split sizes into ranges of at most `limit`; a larger size is a range of its own.

    With `padded`, `sizes` must be in descending order.
    """
    begins: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        total += sizes[begins[-1]] if padded and begins else size
        if not begins or total > limit:
            begins.append(i)
            total = size
    return [range(*ends) for ends in pairwise([*begins, len(sizes)])]

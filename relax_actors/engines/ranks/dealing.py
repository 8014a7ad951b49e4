"""Which rank writes which tensors of the model: pure, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """Tensors that are written together.

    Attributes:
        size: in numbers.
        holders: ranks that hold a part of it.
    """

    size: int
    holders: Collection[int]


def deal(entries: Sequence[Entry], writers: int) -> list[int]:
    """Return the rank, of the first `writers`, that writes each entry of the whole model.

    An entry goes to a rank that holds a part of it, if one of them writes, and among these to the one with the least so
    far; large entries are dealt first.
    """
    written, owners = [0] * writers, [0] * len(entries)
    for number in sorted(range(len(entries)), key=lambda n: -entries[n].size):
        entry = entries[number]
        able = [rank for rank in entry.holders if rank < writers] or range(writers)
        owners[number] = min(able, key=lambda rank: (written[rank], rank))
        written[owners[number]] += entry.size
    return owners


def nearest(holders: Collection[int], rank: int) -> int:
    """Return the holder that sends a part to a rank: itself if it has it, else the one with the closest number.

    Ranks with close numbers are on one node.
    """
    return min(holders, key=lambda holder: (abs(holder - rank), holder))

"""Rules of [record]: which rows of a step are kept, and why. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import xxhash

from relax_actors.messages import DropReason
from relax_actors.record.segments import Shelf

if TYPE_CHECKING:
    from relax_actors.config.record import RecordSection

_INNOCENT = frozenset({DropReason.NO_SIGNAL, DropReason.SURPLUS, DropReason.TOO_OLD})
"""Reasons of dropped rows that are no fault."""


class End(StrEnum):
    """What became of a row."""

    TRAINED = "trained"
    DROPPED = "dropped"
    QUARANTINED = "quarantined"
    IN_FLIGHT = "in flight"
    """Its step has no batch yet."""
    SURPLUS = "surplus"
    """Still in flight when the batch of its step was complete."""


@dataclass(frozen=True, slots=True)
class Group:
    """A row of a step: a prompt with its samples, as far as rules and overviews need it.

    Attributes:
        index: its index in the step.
        end: what became of it.
        reason: reason of a dropped row, role that failed on a quarantined one; else empty.
        rewards: rewards of its samples; empty if it was not scored.
        oldest: oldest version of the weights that sampled a token; None if none did, or it is unknown.
        tokens: own tokens of its samples; None if they are unknown, as of a recorded row that was not kept.
    """

    index: int
    end: End
    reason: str = ""
    rewards: tuple[float, ...] = ()
    oldest: int | None = None
    tokens: int | None = None

    @property
    def reward(self) -> float | None:
        """Mean reward; None if the row was not scored."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def failed(self) -> bool:
        """Whether a fault ended the row."""
        return self.end is End.QUARANTINED or (self.end is End.DROPPED and self.reason not in _INNOCENT)


def kept_groups(section: RecordSection, seed: int, step: int, groups: Sequence[Group]) -> dict[int, list[str]]:
    """Return a step's kept rows: index -> names of the rules of [record]."""
    scored = sorted((group.reward, group.index) for group in groups if group.reward is not None)
    lowest = {index for _, index in scored[: section.lowest]}
    highest = {index for _, index in scored[max(0, len(scored) - section.highest) :]} if section.highest else set()
    kept = {}
    for group in groups:
        rules = {
            "every": bool(section.every) and step % section.every == 0,
            "share": _is_drawn(section.share, f"{seed}.{step}.{group.index}"),
            "highest": group.index in highest,
            "lowest": group.index in lowest,
            "failed": section.failed and group.failed,
        }
        if why := [name for name, holds in rules.items() if holds]:
            kept[group.index] = why
    return kept


def kept_held_out(section: RecordSection, indices: Sequence[int]) -> list[int]:
    """Return the held-out rows of a version that are kept, spread evenly over the given ones."""
    wanted = min(section.evaluation, len(indices))
    return [indices[i * len(indices) // wanted] for i in range(wanted)]


def shelf_of(why: Sequence[str]) -> Shelf:
    """Return the shelf of a row that these rules keep."""
    return Shelf.SPECIAL if {"failed", "evaluation"} & set(why) else Shelf.ROWS


def _is_drawn(share: float, name: str) -> bool:
    """Whether a row is in a random share, which follows from its name alone."""
    return xxhash.xxh3_64_intdigest(name.encode()) < share * 2**64

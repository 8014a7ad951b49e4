"""Position of the recorder, and rows below the floor that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

RECORDER = "recorder"
"""Child of the root that writes the record."""
MAX_STEPS, MAX_VERSIONS = 64, 8
"""Most steps below the floor, and most finished evaluations, that stay for a recorder that is behind."""


@dataclass(frozen=True, slots=True)
class Position:
    """What a recorder has read.

    Attributes:
        step: last recorded step; -1 before the first.
        version: last recorded evaluation, by its version; -1 before the first.
    """

    step: int = -1
    version: int = -1


def position_of(lease: Mapping[str, Any] | None) -> Position | None:
    """Return the recorder's position by the root's lease, or None.

    A recorder that has not started yet has read nothing.
    """
    children = {} if lease is None else lease["children"]
    state = children.get(RECORDER)
    if not isinstance(state, dict):
        return None
    recorded = state.get("recorded")
    fields = recorded if isinstance(recorded, dict) else {}
    numbers = (fields.get(name, -1) for name in ("step", "version"))
    return Position(*(number if type(number) is int else -1 for number in numbers))


def first_unread(floor: int, recorded: int, bytes_of: Callable[[int], int], room: int) -> int:
    """Return the first step whose rows stay, within `MAX_STEPS` and bytes.

    `recorded` is the last recorded step, `bytes_of` returns the bytes of the rows of a step, and `room` are those that
    all steps below the floor may take together.
    """
    first = floor
    while first > max(0, recorded + 1, floor - MAX_STEPS):
        room -= bytes_of(first - 1)
        if room < 0:
            break
        first -= 1
    return first


def read_versions(results: Collection[int], recorded: int) -> frozenset[int]:
    """Return evaluated versions whose rows may go, recorded or old."""
    waiting = sorted(version for version in results if version > recorded)[-MAX_VERSIONS:]
    return frozenset(results).difference(waiting)

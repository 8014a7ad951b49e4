"""Actors that host environments: those with a lease."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from broker.leases import RunState

ROLE = "environment"
LOOK_SECONDS, ABSENT_SECONDS = 1.0, 2.0
"""Interval of looking at the leases, and time without a lease after which an actor counts as gone."""


@dataclass(frozen=True, slots=True)
class Member:
    """An actor with a lease: its incarnation, and when the lease was last seen."""

    incarnation: int
    seen: float


class Members:
    """Actors of the pool, by number."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._members: dict[int, Member] = {}
        self._looked_at = float("-inf")

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def __contains__(self, number: object) -> bool:
        return number in self._members

    @property
    def is_stale(self) -> bool:
        """Whether the leases should be looked at again."""
        return time.monotonic() - self._looked_at > LOOK_SECONDS

    async def look(self) -> list[tuple[int, int]]:
        """Return actors with new incarnations by their leases, and the one that has ended."""
        self._looked_at = time.monotonic()
        leases: dict[str, Any] = await self._state.leases(ROLE)
        now, replaced = time.monotonic(), []
        for name, lease in leases.items():
            number, incarnation = name.rpartition(".")[2], lease.get("incarnation")
            if number.isdigit() and isinstance(incarnation, int):
                before = self._members.get(int(number))
                self._members[int(number)] = Member(incarnation, now)
                if before is not None and before.incarnation != incarnation:
                    replaced.append((int(number), before.incarnation))
        self._members = {n: member for n, member in self._members.items() if now - member.seen < ABSENT_SECONDS}
        return replaced

    def choose(self, session: str, without: Container[int]) -> int | None:
        """Return the actor for a session by rendezvous hashing; None if all are in `without`."""
        free = [n for n in self._members if n not in without]
        return max(free, key=lambda n: xxhash.xxh3_64_intdigest(f"{session}|{n}".encode()), default=None)

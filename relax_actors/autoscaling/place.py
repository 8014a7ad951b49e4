"""Choose the node on which rollouts are added or taken away: a pure function of what the nodes report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A node with rollouts that may be scaled.

    Attributes:
        node: number of the node.
        engines: its rollouts, without clients of external engines.
        room: further rollouts for which it has free GPUs; None if they compute on none, so that nothing limits them.
        actors: all its actors; of two nodes without GPUs the one with fewer actors gets the next rollout.
    """

    node: int
    engines: int
    room: int | None = None
    actors: int = 0


def place_for(places: Sequence[Place], change: int) -> tuple[Place, int] | None:
    """Return the node to change, and the number of its rollouts afterwards; None if no node can change.

    Rollouts are added where most GPUs are free, else where fewest actors are; they are taken from the node with most
    rollouts, so that one remains on each. One node is changed at a time, because an operation is of one node; the next
    decision changes another.

    Args:
        places: nodes that may be scaled.
        change: number of rollouts to add, negative to take away.
    """
    if change > 0:
        free = [place for place in places if place.room is None or place.room > 0]
        if not free:
            return None
        best = max(free, key=lambda p: (p.room is not None, p.room or 0, -p.actors, -p.node))
        return best, best.engines + (change if best.room is None else min(change, best.room))
    if not places:
        return None
    most = max(places, key=lambda p: (p.engines, p.node))
    after = max(1, most.engines + change)
    return None if after == most.engines else (most, after)

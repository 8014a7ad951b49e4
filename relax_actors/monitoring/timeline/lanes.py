"""Lanes of a timeline: spans of one actor that overlap are laid beside each other."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

from relax_actors.monitoring.timeline.span import Span

ORDER = (
    "root",
    "node",
    "prompts",
    "media",
    "rollout",
    "environment",
    "agent",
    "gateway",
    "reward",
    "advantages",
    "trainer",
)
"""Roles in the order in which their lanes are shown; others come before the trainer."""


def laid_out(spans: Iterable[Span]) -> list[tuple[str, list[list[Span]]]]:
    """Return the lanes of each actor; the spans of a lane do not overlap."""
    by_actor: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        by_actor[span.actor].append(span)
    return [(actor, _lanes(own)) for actor, own in sorted(by_actor.items(), key=lambda entry: _place(entry[0]))]


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """Put spans, by their beginnings, on the lane that is free for longest."""
    lanes: list[list[Span]] = []
    free: list[tuple[float, int]] = []
    for span in spans:
        if free and free[0][0] <= span.begin:
            _, lane = heapq.heappop(free)
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(span)
        heapq.heappush(free, (span.end, lane))
    return lanes


def _place(actor: str) -> tuple[float, str, int]:
    role, _, n = actor.rpartition(".")
    place = float(ORDER.index(role)) if role in ORDER else len(ORDER) - 1.5
    return place, role, int(n) if n.isdigit() else 0

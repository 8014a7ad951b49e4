"""`/api/timeline`: what each actor did when, as lanes of spans; see `relax_actors.monitoring.timeline`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from relax_actors.console.query import Query
from relax_actors.monitoring.timeline import Instant, Timeline, laid_out
from relax_actors.monitoring.timeline.reader import read_step, read_timeline

MAX_SPANS = 200_000
"""Spans of an answer; the newest ones."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane of an actor.

    Attributes:
        actor: the actor.
        number: which of its lanes, from 0 on.
        spans: `[name, begin, seconds, row]` each, in order; `name` is an index in `names`, `begin` seconds after
            `begin` of the answer, `row` an index in `rows` or -1.
    """

    actor: str
    number: int
    spans: list[tuple[int, float, float, int]]


@dataclass(frozen=True, slots=True)
class TimelineAnswer:
    """Lanes in the order in which they are shown.

    Attributes:
        begin: Unix time in seconds of the first span.
        end: that of the end of the last span.
        names: names of the spans.
        rows: ids of the rows.
        lanes: the lanes.
        instants: events, with their Unix times.
        left_out: older spans that are not shown.
    """

    begin: float
    end: float
    names: list[str]
    rows: list[str]
    lanes: list[Lane]
    instants: list[Instant]
    left_out: int


async def answer(query: Query) -> TimelineAnswer:
    """Return the timeline of the run, or of parameter `step`."""
    run = query.run
    connection = await run.connection()
    step = query.number("step")
    async with run.timeline:
        work = read_timeline(connection, run.rows) if step is None else read_step(connection, run.rows, step)
        timeline = await run.within(connection, work)
        return await asyncio.to_thread(packed, timeline)


def packed(timeline: Timeline) -> TimelineAnswer:
    """Return the newest spans of a timeline in few bytes."""
    spans = timeline.spans[-MAX_SPANS:]
    begin = min((span.begin for span in spans), default=0.0)
    names: dict[str, int] = {}
    rows: dict[str, int] = {}
    lanes = []
    for actor, own in laid_out(spans):
        for number, lane in enumerate(own):
            packed_spans = [
                (
                    names.setdefault(span.name, len(names)),
                    round(span.begin - begin, 6),
                    round(span.end - span.begin, 6),
                    rows.setdefault(span.row, len(rows)) if span.row else -1,
                )
                for span in lane
            ]
            lanes.append(Lane(actor, number, packed_spans))
    end = max((span.end for span in spans), default=0.0)
    instants = [instant for instant in timeline.instants if instant.time >= begin]
    left_out = len(timeline.spans) - len(spans)
    return TimelineAnswer(begin, end, list(names), list(rows), lanes, instants, left_out)

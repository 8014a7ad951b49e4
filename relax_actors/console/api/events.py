"""`/api/events`: the newest events of a run, with what happened in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from relax_actors.console.picture import Event
from relax_actors.console.query import Query


@dataclass(frozen=True, slots=True)
class Events:
    """Events, the newest first."""

    events: list[Event]


async def answer(query: Query) -> Events:
    """Return events; parameters `kind` and `sender` filter them, and `last` bounds their number."""
    picture = await query.run.refresh()
    kind, sender = query.text("kind"), query.text("sender")
    events = [
        event
        for event in reversed(picture.events)
        if kind in ("", event.kind) and sender in ("", event.sender, event.sender.rpartition(".")[0])
    ]
    return Events(events[: query.number("last", 200, most=2000)])

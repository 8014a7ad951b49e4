"""Chrome trace event JSON of a timeline, for Perfetto and speedscope.

A process is a role, a thread is a lane of an actor, and an arrow follows a row from column to column. Times are
microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from relax_actors.monitoring.timeline.lanes import laid_out
from relax_actors.monitoring.timeline.span import Span, Timeline


def chrome_trace(timeline: Timeline, profiles: Sequence[str] = ()) -> dict[str, Any]:
    """Return the trace as plain data; `otherData` lists the run's profiles."""
    events: list[dict[str, Any]] = []
    roles: dict[str, int] = {}
    threads: dict[str, tuple[int, int]] = {}
    flows: defaultdict[str, list[tuple[Span, int, int]]] = defaultdict(list)
    tid = 0
    for actor, lanes in laid_out(timeline.spans):
        role = actor.rpartition(".")[0] or actor
        pid = _process(role, roles, events)
        for k, lane in enumerate(lanes):
            tid += 1
            threads.setdefault(actor, (pid, tid))
            events.append(_named("thread_name", pid, tid, actor if not k else f"{actor}, {k + 1}"))
            events.append(_named("thread_sort_index", pid, tid, tid))
            for span in lane:
                events.append(_span(span, pid, tid))
                if span.row:
                    flows[span.row].append((span, pid, tid))
    for instant in timeline.instants:
        pid, own = threads.get(instant.actor, (0, 0))
        scope = {"pid": pid, "tid": own, "s": "t" if own else "g"}
        detail = {"detail": instant.detail, "actor": instant.actor}
        events.append({"ph": "i", "name": instant.name, "ts": _micro(instant.time), "args": detail, **scope})
    events += _arrows(flows)
    other = {"run": timeline.run, "profiles": list(profiles)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _process(role: str, roles: dict[str, int], events: list[dict[str, Any]]) -> int:
    if role not in roles:
        roles[role] = len(roles) + 1
        events.append(_named("process_name", roles[role], 0, role))
        events.append(_named("process_sort_index", roles[role], 0, roles[role]))
    return roles[role]


def _named(kind: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    argument = "sort_index" if kind.endswith("sort_index") else "name"
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {argument: value}}


def _span(span: Span, pid: int, tid: int) -> dict[str, Any]:
    facts: dict[str, Any] = dict(span.arguments)
    if span.row:
        facts["row"] = span.row
    if span.step is not None:
        facts["step"] = span.step
    begin = _micro(span.begin)
    place = {"pid": pid, "tid": tid, "ts": begin, "dur": _micro(span.end) - begin}
    return {"ph": "X", "name": span.name, "cat": span.role, **place, "args": facts}


def _arrows(flows: dict[str, list[tuple[Span, int, int]]]) -> list[dict[str, Any]]:
    """Return an arrow from each span of a row to the next one that begins when it has ended."""
    events: list[dict[str, Any]] = []
    for row, spans in flows.items():
        spans.sort(key=lambda entry: entry[0].end)
        for (before, *source), (after, *target) in pairwise(spans):
            if after.begin < before.end:
                continue
            arrow = {"name": "row", "cat": "row", "id": f"{row} {after.name}"}
            pid, tid = source
            events.append({"ph": "s", **arrow, "pid": pid, "tid": tid, "ts": _micro(before.end)})
            pid, tid = target
            events.append({"ph": "f", "bp": "e", **arrow, "pid": pid, "tid": tid, "ts": _micro(after.begin)})
    return events


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)

"""`/api/actors`: nodes and actors as their supervisors report them, and what each actor waits for."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from broker.subjects import NAME
from relax_actors.console.query import Query
from relax_actors.console.run import ConsoleRun
from relax_actors.devices.machine import MachineUse
from relax_actors.devices.placement import shown
from relax_actors.monitoring.leases import activity, children_of, number

NOT_ACTORS = ("node.", "root.", "owner.")
MAX_ROWS, MAX_GPUS = 64, 64
_ACTOR = re.compile(rf"{NAME.pattern}\.(0|[1-9][0-9]{{0,8}})")
FIGURES = ("rows", "rows_per_second", "busy", "cpu", "rss_mib")


@dataclass(frozen=True, slots=True)
class Actor:
    """An actor.

    Attributes:
        name: its role and number.
        role: its role.
        phase: state that its supervisor reports: `ready`, `starting`, `backing_off`, `down`; `over` after the run.
        since: Unix time in seconds since which it is in this state.
        restarts: restarts that its present supervisor has counted.
        restarts_of_run: restarts since the start of the run, as far as the log goes back.
        pid: its process.
        incarnation: number of its incarnation.
        activity: rows that it handles or what it waits for, and for how long.
        waits_for: what it waits for; empty if it works.
        waiting_seconds: for how long.
        rows: rows that it handles.
        gpus: its GPUs.
        figures: newest figures of its process.
    """

    name: str
    role: str
    phase: str
    since: float
    restarts: int
    restarts_of_run: int
    pid: int | None = None
    incarnation: int | None = None
    activity: str = ""
    waits_for: str = ""
    waiting_seconds: float | None = None
    rows: list[str] = field(default_factory=list)
    gpus: str = ""
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the run with its actors.

    Attributes:
        name: `node`, or `node <n> <name>` of a node that joined.
        has_lease: whether it has a lease; without one its supervisor is down, or cut off from the broker.
        pid: its process.
        actors: its actors.
        machine: load, memory, disk and GPUs of its machine; None if the node has not reported them.
        holders: actors that hold each GPU, by its number.
    """

    name: str
    has_lease: bool
    pid: int | None
    actors: list[Actor]
    machine: MachineUse | None = None
    holders: dict[int, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Actors:
    """All nodes of a run.

    Attributes:
        live: whether the run is up.
        broker: state of an embedded broker as its supervisor reports it.
        nodes: nodes, the one of `relax up` first.
        ignored: entries under the keys of leases that are no leases, with the reason.
    """

    live: bool
    broker: dict[str, Any]
    nodes: list[Node]
    ignored: dict[str, str]


async def answer(query: Query) -> Actors:
    """Return the actors of a run."""
    run = query.run
    picture = await run.refresh()
    leases = run.book.current()
    broker = children_of(leases.get("root.0", {})).get("broker")
    supervisors = [name for name in sorted(leases, key=_order) if name.startswith("node.")]
    names = [name for name in leases if not name.startswith(NOT_ACTORS)]
    children = [child for name in supervisors for child in children_of(leases[name]) if _ACTOR.fullmatch(child)]
    figures = await _figures(run, list(dict.fromkeys([*names, *children])) or list(picture.actors))
    nodes = [_node(run, name, leases, figures) for name in supervisors]
    if not nodes:
        known = names or list(picture.actors)
        phase = "ready" if names else "unknown" if run.live else "over"
        nodes = [Node("node", False, None, [_actor(run, name, {"phase": phase}, leases, figures) for name in known])]
    return Actors(run.live, broker if isinstance(broker, dict) else {}, nodes, dict(run.book.forged))


def _order(name: str) -> tuple[str, int]:
    role, _, n = name.rpartition(".")
    return role, int(n) if n.isdigit() else 0


def _node(run: ConsoleRun, name: str, leases: dict[str, dict[str, Any]], figures: dict[str, dict[str, float]]) -> Node:
    lease = leases[name]
    n = name.partition(".")[2]
    label = ("node" if n == "0" else f"node {n}") + (f" {str(lease['name'])[:80]}" if lease.get("name") else "")
    gpus = lease.get("gpus") or {}
    holders: dict[int, list[str]] = {}
    for child, held in gpus.items():
        for gpu in held[:MAX_GPUS] if isinstance(held, list) else ():
            if isinstance(gpu, int):
                holders.setdefault(gpu, []).append(child[:90])
    actors = [
        _actor(run, child[:90], {**state, "gpus": gpus.get(child)}, leases, figures)
        for child, state in sorted(children_of(lease).items(), key=lambda entry: _order(entry[0]))
        if isinstance(state, dict)
    ]
    return Node(label, True, lease.get("pid"), actors, MachineUse.of(lease.get("machine")), holders)


def _actor(
    run: ConsoleRun,
    name: str,
    state: dict[str, Any],
    leases: dict[str, dict[str, Any]],
    figures: dict[str, dict[str, float]],
) -> Actor:
    lease = leases.get(name, {})
    since = number(lease.get("doing_since"), 0.0)
    rows = lease.get("rows") or []
    gpus = state.get("gpus")
    return Actor(
        name=name,
        role=name.rpartition(".")[0],
        phase=str(state.get("phase"))[:20],
        since=number(state.get("since"), number(lease.get("since"), 0.0)),
        restarts=int(number(state.get("restarts"), 0)),
        restarts_of_run=run.picture.restarts[name],
        pid=lease.get("pid"),
        incarnation=lease.get("incarnation"),
        activity=activity(lease) if lease else "",
        waits_for=str(lease.get("waits_for") or "")[:200] if not rows else "",
        waiting_seconds=round(max(0.0, time.time() - since), 1) if since else None,
        rows=[str(row)[:40] for row in rows[:MAX_ROWS]],
        gpus=shown(tuple(gpus[:MAX_GPUS])) if isinstance(gpus, list) and gpus else "",
        figures=figures.get(name, {}),
    )


async def _figures(run: ConsoleRun, names: list[str]) -> dict[str, dict[str, float]]:
    """Return the newest figures of actors by name."""
    figures: dict[str, dict[str, float]] = {}
    for name, data in (await run.last_metrics(names)).items():
        with suppress(ValueError, AttributeError, TypeError):
            body = {**run.picture.states.get(name, {}), **json.loads(data)}
            figures[name] = {key: float(body[key]) for key in FIGURES if isinstance(body.get(key), int | float)}
    return figures

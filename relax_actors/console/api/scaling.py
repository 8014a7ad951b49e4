"""`/api/scaling`: actors of each role as configured and as they are, operations, and decisions of the autoscaler."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from relax_actors.console.api.actors import NOT_ACTORS
from relax_actors.console.picture import Event
from relax_actors.console.query import Query

AUTHORS = ("autoscaler",)
"""Roles whose events give the reasons of changes."""
MAX_OPERATIONS = 200


@dataclass(frozen=True, slots=True)
class Pool:
    """Actors of a role: as the saved settings want them on the node of `relax up`, and as they hold leases."""

    role: str
    wanted: int | None
    present: int


@dataclass(frozen=True, slots=True)
class Scaling:
    """Pools of a run, the operations on them, and the decisions of the autoscaler; the newest first."""

    pools: list[Pool]
    operations: list[dict[str, Any]]
    events: list[Event]


async def answer(query: Query) -> Scaling:
    """Return the pools of a run."""
    run = query.run
    picture = await run.refresh()
    settings = (run.folder.saved_config() or {}).get("config", {})
    sections = {**settings, **settings.get("roles", {})}
    present = Counter(name.rpartition(".")[0] for name in run.book.current() if not name.startswith(NOT_ACTORS))
    # Sections of roles that this run does not have hold defaults.
    roles = dict.fromkeys([*(name.rpartition(".")[0] for name in picture.actors), *present])
    pools = [Pool(role, _replicas(sections.get(role)), present[role]) for role in roles]
    newest = sorted(picture.operations.operations.items(), reverse=True)[:MAX_OPERATIONS]
    events = [event for event in reversed(picture.events) if event.sender.partition(".")[0] in AUTHORS]
    return Scaling(pools, [operation.shown() for _, operation in newest], events)


def _replicas(section: Any) -> int | None:
    return section.get("replicas") if isinstance(section, dict) else None

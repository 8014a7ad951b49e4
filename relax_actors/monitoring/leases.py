"""Text of the leases of actors and supervisors.

Any client of the broker can write a lease, so no field is trusted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

MAX_NUMBER = 1e18
MAX_ROWS = 3
SHOWN_VERSION = 8
"""Digits of a version of code that people see; versions have 16."""


def children_of(lease: dict[str, Any]) -> dict[str, Any]:
    """Return the states of a supervisor's children by name; empty if the lease has none."""
    children = lease.get("children")
    return children if isinstance(children, dict) else {}


def number(value: Any, default: float) -> float:
    """Return a field as a number, or the default if it is none or absurd."""
    return value if isinstance(value, int | float) and abs(value) < MAX_NUMBER else default


def age(lease: dict[str, Any]) -> str:
    """Format the seconds since field `since`."""
    return f"{time.time() - number(lease.get('since'), 0.0):.0f} s"


def code_of(lease: dict[str, Any]) -> str:
    """Return the short version of the user's code in an actor; empty without."""
    version = lease.get("code")
    return version[:SHOWN_VERSION] if isinstance(version, str) else ""


def activity(lease: dict[str, Any]) -> str:
    """Describe what an actor does: the rows it handles or what it waits for, and for how long."""
    rows = lease.get("rows")
    rows = [str(row)[:40] for row in rows] if isinstance(rows, list) else []
    more = f" and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else ""
    waits_for = str(lease.get("waits_for") or "")[:200]
    idle = f"waiting for {waits_for}" if waits_for else "working"
    text = f"handling {', '.join(rows[:MAX_ROWS])}{more}" if rows else idle
    since = number(lease.get("doing_since"), 0.0)
    return f"{text} for {max(0.0, time.time() - since):.1f} s" if since else text


def run_waits_for(nodes: Mapping[str, dict[str, Any]], lease: dict[str, Any] | None, role: str = "trainer") -> str:
    """Describe what a run without steps waits for: starts, or the trainer's wait.

    `role` takes the trainer's place: the evaluator in a run without steps. `lease` is that role's, if it has one.
    """
    states = [entry for node in nodes.values() for entry in children_of(node).items() if isinstance(entry[1], dict)]
    starting = [str(name)[:90] for name, state in states if state.get("phase") != "ready"]
    if not states:
        return "the actors start"
    if starting:
        more = f" and {len(starting) - MAX_ROWS} more" if starting[MAX_ROWS:] else ""
        names = ", ".join(starting[:MAX_ROWS]) + more
        zygotes = [node["zygote"] for node in nodes.values() if isinstance(node.get("zygote"), dict)]
        imports = ", packages are being imported" if any(z.get("phase") == "importing" for z in zygotes) else ""
        return f"{len(states) - len(starting)} of {len(states)} actors are ready, {names} not yet{imports}"
    if lease is None and f"{role}.0" not in (name for name, _ in states):
        return f"no node has the {role}; move it to one with `relax roles move`, or start `relax node --role {role}`"
    return f"the {role} starts" if lease is None else f"the {role} is {activity(lease)}"

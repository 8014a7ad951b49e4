"""Text of the leases of actors and supervisors.

Any client of the broker can write a lease, so no field is trusted.
"""

from __future__ import annotations

import time
from typing import Any

MAX_NUMBER = 1e18
MAX_ROWS = 3


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


def activity(lease: dict[str, Any]) -> str:
    """Describe what an actor does: the rows it handles or what it waits for, and since when."""
    rows = lease.get("rows")
    rows = [str(row)[:40] for row in rows] if isinstance(rows, list) else []
    more = f" and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else ""
    waits_for = str(lease.get("waits_for") or "")[:200]
    idle = f"waits for {waits_for}" if waits_for else "works"
    text = f"handles {', '.join(rows[:MAX_ROWS])}{more}" if rows else idle
    since = number(lease.get("doing_since"), 0.0)
    return f"{text}, since {max(0.0, time.time() - since):.1f} s" if since else text

"""`relax status`: where a run stands."""

from __future__ import annotations

import json as json_module
import sys
from typing import Any

from relax_actors.cli.options import AsJson, Broker, Credentials, RunName

NOT_ACTORS = ("node.", "root.", "owner.")
"""Prefixes of the leases that are not held by actors."""


def status(run: RunName, json: AsJson = False, broker: Broker = None, credentials: Credentials = None) -> None:
    """Show the progress of a run and its actors."""
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.monitoring.summary import accounting, read_ledger

    with connected(run, Access(broker, credentials)) as at:
        ledger = read_ledger(at.table, at.settings)
        leases = at.table.connection.call(at.state.leases(), 10)
        fill = at.table.fill()
    last = ledger.batches[max(ledger.batches)] if ledger.batches else None
    body = {
        "run": at.settings.run.name,
        "step": ledger.version or 0,
        "steps": at.settings.run.steps,
        **({"reward": last.reward if last else None} if at.settings.algorithm.rows == "sampled" else {}),
        "staleness": last.staleness if last else None,
        **accounting(ledger),
        "table_percent": round(100 * fill.size / max(1, fill.max_size), 1),
        "actors": {name: lease for name, lease in leases.items() if not name.startswith(NOT_ACTORS)},
    }
    if json:
        sys.stdout.write(json_module.dumps(body) + "\n")
    else:
        _print(body)


def _print(body: dict[str, Any]) -> None:
    from rich.table import Table

    from relax_actors.monitoring.leases import activity, age
    from relax_actors.monitoring.screen import Screen
    from relax_actors.printable import printable

    screen = Screen()
    for name, value in body.items():
        if name != "actors":
            screen.print(f"{name:13} {printable(as_text(value))}")
    table = Table("actor", "pid", "incarnation", "up", "activity")
    for name, lease in sorted(body["actors"].items()):
        numbers = (str(lease.get(field, "?"))[:20] for field in ("pid", "incarnation"))
        cells = (name, *numbers, age(lease), activity(lease))
        table.add_row(*map(printable, cells))
    screen.print(table)


def as_text(value: Any) -> str:
    """Format a figure for people; what does not exist yet is said."""
    if value is None:
        return "none yet"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

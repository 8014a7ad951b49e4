"""`/api/ledger`: what became of every row, and why rows were dropped or quarantined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relax_actors.console.query import Query
from relax_actors.monitoring.summary import accounting

MAX_ROWS = 200


@dataclass(frozen=True, slots=True)
class LedgerAnswer:
    """Counts of rows by their end.

    Attributes:
        account: floor, counts and violations, as `relax ledger --json` prints them.
        adds_up: whether admitted = trained + dropped + quarantined + in flight, without violations so far.
        checked_from: first step whose batch has been checked; 0 once all have been. A long run is shown before the
            batches that a checkpoint covers are read.
        dropped: dropped rows whose steps are not below the floor, by reason.
        dropped_below_floor: dropped rows that a checkpoint has removed from the table; their reasons are in the record.
        quarantined: the newest quarantined rows with their role, error and traceback.
    """

    account: dict[str, Any]
    adds_up: bool
    checked_from: int
    dropped: dict[str, int]
    dropped_below_floor: int
    quarantined: list[dict[str, Any]]


async def answer(query: Query) -> LedgerAnswer:
    """Return the ledger of a run."""
    picture = await query.run.refresh()
    account = accounting(picture.ledger)
    total = sum(account[name] for name in ("trained", "dropped", "quarantined", "in_flight"))
    rows = [
        {
            "row": str(row),
            "role": cell.role,
            "deliveries": cell.deliveries,
            "error": cell.error,
            "trace": cell.traceback,
        }
        for row, cell in sorted(picture.quarantined.items(), reverse=True)[:MAX_ROWS]
    ]
    adds_up = account["admitted"] == total and not account["violations"]
    ledger = picture.ledger
    return LedgerAnswer(account, adds_up, ledger.checked_from, dict(picture.dropped()), ledger.totals.dropped, rows)

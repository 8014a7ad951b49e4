"""Looks up in the table whether rows have ended, so that requests to their sessions do not wait for an actor."""

from __future__ import annotations

import asyncio

from broker.subjects import RowId
from broker.table import Table
from relax_actors.runtime.finish import ends_row
from relax_actors.runtime.row import FAILURES

ROW_SECONDS = 1.0
"""Interval at which a row that has not ended is looked up, while requests wait for its actor to restart."""
MAX_LOOKED = 4096


class EndedRows:
    """Rows that have ended. Used in the event loop's thread."""

    def __init__(self, table: Table) -> None:
        self._table = table
        # When a row was looked up, and whether it had ended.
        self._looked: dict[RowId, tuple[float, bool]] = {}

    async def has(self, row: RowId, now: float) -> bool:
        """Whether a row has its trajectory, was dropped or quarantined, was removed, or never existed.

        Repeats the look-up until the broker answers.
        """
        looked, ended = self._looked.get(row, (float("-inf"), False))
        if ended or now - looked < ROW_SECONDS:
            return ended
        subjects = [self._table.subject(row, field) for field in ("prompt", "trajectory", *FAILURES)]
        prompt, trajectory, *failures = await asyncio.gather(*(self._table.get_async(subject) for subject in subjects))
        ended = prompt is None or trajectory is not None or any(map(ends_row, failures))
        self._looked.pop(row, None)
        self._looked[row] = now, ended
        while len(self._looked) > MAX_LOOKED:
            del self._looked[next(iter(self._looked))]
        return ended

"""End rows that cannot be trained, for the trainer or the critic; they are replaced."""

from __future__ import annotations

from broker.subjects import RowId
from relax_actors.errors import RelaxError, RowError, StoreError
from relax_actors.messages import Dropped, DropReason, Quarantined
from relax_actors.runtime import Context
from relax_actors.runtime.cells import is_oversized, remove_or_wait
from relax_actors.runtime.first_rows import FLUSH_SECONDS, FirstRows, all_rows_failed, first_rows


def ending_of_unreadable(role: str, error: RelaxError) -> Dropped | Quarantined:
    """Drop a row whose data was lost; quarantine a row whose data is malformed."""
    if isinstance(error, StoreError):
        return Dropped(DropReason.LOST_SEGMENT, str(error)[:2000])
    return Quarantined(role, 1, f"{type(error).__name__}: {error}"[:2000], "")


class RowEndings:
    """Drops and quarantines rows; stops the run if the first rows are all malformed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._first_rows = FirstRows(first_rows(context.config.trainer.prompts_per_step))

    def succeeded(self) -> None:
        """Record that a training row was usable."""
        self._first_rows.succeeded("group")

    def end(self, row: RowId, ending: Dropped | Quarantined) -> str:
        """Drop or quarantine a row; return its column, or raise AllRowsFailedError."""
        table, journal = self._context.table, self._context.journal
        field = "dropped" if isinstance(ending, Dropped) else "quarantined"
        subject = table.subject(row, field)
        while not table.put(subject, ending):
            existing = table.get(subject, direct=False)
            if existing is not None and not is_oversized(table.subjects.parse(subject), existing):
                break
            if existing is not None:
                remove_or_wait(self._context, existing)
        if isinstance(ending, Dropped):
            journal.event("row_dropped", row=str(row), reason=ending.reason, detail=ending.detail)
            return field
        journal.event("row_quarantined", row=str(row), deliveries=ending.deliveries, error=ending.error)
        error = RowError(f"{row}: {ending.error}")
        if count := self._first_rows.failed(row, error, final=True):
            stop = all_rows_failed(self._context, row.kind, count, error)
            journal.flush(FLUSH_SECONDS)
            raise stop
        return field

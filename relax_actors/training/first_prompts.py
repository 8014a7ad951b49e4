"""First cells of rows: prompts, or `quarantined`; stops the run if no prompt can be made."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from broker.subjects import RowId
from relax_actors.errors import CodecError, RowError
from relax_actors.messages import Prompt, Quarantined
from relax_actors.runtime import Context
from relax_actors.runtime.first_rows import FLUSH_SECONDS, MAX_ROWS, FirstRows, all_rows_failed

UNUSABLE_PROMPTS = 4 * MAX_ROWS
"""Prompts that must fail at the start before the run stops; unlike rows of other roles they cost next to nothing."""


class FirstPrompts:
    """Makes the first cells of rows; the run stops if the first `limit` prompts fail."""

    def __init__(self, context: Context, limit: int = UNUSABLE_PROMPTS) -> None:
        self._context, self._table = context, context.table
        self._first_rows = FirstRows(limit)
        self._failed: tuple[str, int, Exception] | None = None

    def cells(self, rows: Sequence[RowId], make: Callable[[RowId], Prompt]) -> list[tuple[str, bytes]]:
        """Return the subjects and encoded contents of the first cells of rows.

        `make` makes the prompt of a row; RowError and CodecError quarantine the row.
        """
        return [self._cell(row, make) for row in rows]

    def _cell(self, row: RowId, make: Callable[[RowId], Prompt]) -> tuple[str, bytes]:
        subject = self._table.subject(row, "prompt")
        try:
            cell = subject, self._table.encode(subject, make(row))
        except (RowError, CodecError) as error:
            if count := self._first_rows.failed(row, error, final=True):
                self._failed = row.kind, count, error
            trace = "".join(traceback.format_exception(error))
            self._context.journal.event("row_quarantined", row=str(row), deliveries=1, error=str(error))
            subject = self._table.subject(row, "quarantined")
            quarantined = Quarantined(self._context.role, 1, str(error)[:2000], trace[-8000:])
            return subject, self._table.encode(subject, quarantined)
        self._first_rows.succeeded(row.kind)
        return cell

    def check(self) -> None:
        """Stop the run if the first prompts have all failed; call it after their cells were written.

        Raises:
            AllRowsFailedError: all of them failed with the same error.
        """
        if self._failed is not None:
            error = all_rows_failed(self._context, *self._failed)
            self._context.journal.flush(FLUSH_SECONDS)
            raise error

"""Results of handled rows: written, quarantined or retried, then acknowledged."""

from __future__ import annotations

import asyncio
import errno
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors

from broker.subjects import RowId
from broker.table import Cell
from relax_actors.errors import ActorError, CodecError, RowError, RowTakenError
from relax_actors.messages import Dropped, Quarantined
from relax_actors.runtime.cells import MAX_END_BYTES, REMOVAL_SECONDS
from relax_actors.runtime.context import Context
from relax_actors.runtime.first_rows import FLUSH_SECONDS, FirstRows, all_rows_failed, first_rows
from relax_actors.runtime.handler import BLAMELESS_ERRORS, Job
from relax_actors.runtime.role import Role

RETRY_SECONDS = 0.2
"""Delay of the first retry of a failed row; it grows with the number of failures."""


async def ignore_errors(acknowledgement: Awaitable[Any]) -> None:
    """Send an acknowledgement; a lost one only causes a redelivery."""
    try:
        await acknowledgement
    except nats.errors.Error:
        return


def ends_row(cell: Cell | None) -> bool:
    """Whether a cell of `dropped` or `quarantined` ends its row; an oversized one does not."""
    return cell is not None and len(cell.data) <= MAX_END_BYTES


async def quarantine(context: Context, row: RowId, count: int, error: str, trace: str) -> None:
    """Quarantine a row after `count` deliveries or failures, unless it already is.

    Waits until the trainer has removed a cell that is no end of the row but has its subject.
    """
    table = context.table
    subject = table.subject(row, "quarantined")
    cell = Quarantined(context.role, count, error[:2000], trace[-8000:])
    data = table.encode(subject, cell)
    while not await table.put_async(subject, data):
        if ends_row(existing := await table.get_async(subject, direct=False)):
            return
        if existing is not None:
            await asyncio.sleep(REMOVAL_SECONDS)
    context.journal.event("row_quarantined", row=str(row), deliveries=count, error=error, traceback=trace)


class Finisher:
    """Finishes the jobs of one actor of a pool.

    `is_gone` says whether a row's cells are gone, so that nothing must be written to it; `release` is called before a
    message is acknowledged, to stop extending its deadline. `handled` counts the rows with a written result so far.
    """

    def __init__(
        self,
        role: Role,
        context: Context,
        is_gone: Callable[[RowId], bool],
        release: Callable[[Job], None],
    ) -> None:
        self._role, self._context, self._table = role, context, context.table
        self._is_gone, self._release = is_gone, release
        self.handled = 0
        self._first_rows = FirstRows(first_rows(context.config.trainer.prompts_per_step))
        # Newest cell of the role's column when the first row of a kind failed, by kind.
        self._written_before: dict[str, int] = {}

    async def finish(self, job: Job) -> None:
        """Write a job's result, or deal with its error, and acknowledge its message."""
        if isinstance(job.error, RowTakenError):
            # The message belongs to the other actor, too: an acknowledgement would lose the row if that one dies.
            self._context.journal.event("row_taken", row=str(job.row), error=str(job.error))
            self._release(job)
            return
        if job.error is not None:
            await self._handle_error(job, job.error)
            return
        if job.data is not None and not self._is_gone(job.row):
            written = await self._write(job, job.data)
            if written and job.field == "dropped":
                dropped = self._table.read(job.data, Dropped)
                self._context.journal.event(
                    "row_dropped", row=str(job.row), reason=dropped.reason, detail=dropped.detail
                )
        self.handled += 1
        self._first_rows.succeeded(job.row.kind)
        self._release(job)
        await ignore_errors(job.message.ack())

    async def _write(self, job: Job, data: bytes) -> bool:
        """Write a result; quarantine a row whose column is older than its input."""
        subject = self._table.subject(job.row, job.field)
        while not await self._table.put_async(subject, data):
            existing = await self._table.get_async(subject, direct=False)
            if existing is None and not self._is_gone(job.row):
                continue  # the trainer has removed a stray cell
            if job.field == self._role.writes and existing is not None and existing.sequence < job.stored_at:
                error = f"column {job.field} was written before {job.message.subject.rpartition('.')[2]}"
                await quarantine(self._context, job.row, 1, f"MalformedRow: {error}, which it is made of", "")
            return False
        return True

    async def _handle_error(self, job: Job, error: Exception) -> None:
        if isinstance(error, BLAMELESS_ERRORS) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
            self._context.fail(error)
        text = f"{type(error).__name__}: {error}"
        if self._context.on_trial and self.handled == 0:
            # New code that fails must not cost a row: the operation that started the actor judges its end.
            trial = ActorError(f"row {job.row} failed in new code: {text}")
            self._context.fail(trial.with_traceback(error.__traceback__))
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, RowError | CodecError):
            count = job.message.metadata.num_delivered or 1
            final = True
        else:
            count = await self._context.state.count_failure(self._context.role, job.row, text, trace)
            final = count >= self._context.config.supervision.max_failures
        kind = job.row.kind
        if not self._first_rows.is_decided(kind) and kind not in self._written_before:
            newest = await self._newest_written(kind)
            self._written_before.setdefault(kind, newest)
        if final:
            await quarantine(self._context, job.row, count, text, trace)
            self._release(job)
            await ignore_errors(job.message.ack())
        else:
            self._context.journal.event("row_failed", row=str(job.row), failures=count, error=text, traceback=trace)
            self._release(job)
            await ignore_errors(job.message.nak(delay=RETRY_SECONDS * count))
        if count := self._first_rows.failed(job.row, error, final=final):
            await self._stop_run(kind, count, error)

    async def _newest_written(self, kind: str) -> int:
        """Return the sequence of the newest cell in the role's column of a kind of rows, or 0."""
        if not self._role.writes:
            return 0
        cell = await self._table.get_async(self._table.subjects.column(self._role.writes, kind))
        return 0 if cell is None else cell.sequence

    async def _stop_run(self, kind: str, count: int, error: Exception) -> None:
        """Stop the run, unless other actors of the role have succeeded since the first failure."""
        others = await self._newest_written(kind) > self._written_before[kind]
        if self._first_rows.is_decided(kind):
            return
        self._first_rows.succeeded(kind)  # judged once, so that the run is stopped once
        if others:
            return
        stop = all_rows_failed(self._context, kind, count, error)
        await asyncio.to_thread(self._context.journal.flush, FLUSH_SECONDS)
        self._context.fail(stop)

"""Join of a row's columns: from a message to a job with all columns that a role reads.

Invariant: a join holds no state. When the last column of a row arrives, the others are looked up in the table.
"""

from __future__ import annotations

import asyncio

from nats.aio.msg import Msg

from broker.pull import delivery_of, is_redelivery
from broker.subjects import CellId, RowId
from relax_actors.errors import CodecError, SubjectError
from relax_actors.messages import Checkpoint
from relax_actors.runtime.context import Context
from relax_actors.runtime.finish import ends_row, ignore_errors, quarantine
from relax_actors.runtime.handler import Job
from relax_actors.runtime.role import Role
from relax_actors.runtime.row import FAILURES, REDELIVERY

# Columns that must exist once the key exists, so their own arrival need not trigger the row.
IMPLIED = {
    "media": {"prompt"},
    "trajectory": {"prompt", "media"},
    "reward": {"prompt", "media", "trajectory"},
    "advantage": {"prompt", "media", "trajectory"},
}


def trigger_columns(inputs: tuple[str, ...], rewards: str = "reward") -> list[str]:
    """Return columns whose arrival may complete a row: those that no other one implies."""
    inputs = tuple(dict.fromkeys(inputs))
    implied: set[str] = {"prompt"} if len(inputs) > 1 else set()
    for name in inputs:
        implied |= IMPLIED.get(name, set())
        if name == "advantage":
            implied |= {rewards} | IMPLIED.get(rewards, set())
    return [name for name in inputs if name not in implied]


class Join:
    """Joins the columns of rows for one actor of a pool.

    Attributes:
        inputs: columns that the role reads.
        triggers: columns whose arrival may complete a row.
    """

    def __init__(self, role: Role, context: Context) -> None:
        self._role, self._context, self._table = role, context, context.table
        self._floor = 0
        self.inputs = role.inputs(context.config)
        self.triggers = trigger_columns(self.inputs, context.config.advantages.reads)

    async def on_checkpoint(self, message: Msg) -> None:
        """Learn the floor from a checkpoint's message."""
        try:
            checkpoint = self._table.read(message.data, Checkpoint, subject=message.subject)
        except CodecError:
            return
        self._floor = max(self._floor, checkpoint.floor)

    def is_below_floor(self, row: RowId) -> bool:
        """Whether the row's step is finished, so that its cells are gone."""
        return row.kind == "group" and row.step < self._floor

    async def join(self, message: Msg) -> Job | None:
        """Fetch the row's other columns; None if the row has ended, or a column is missing."""
        try:
            cell = self._table.subjects.parse(message.subject)
        except SubjectError as error:
            self._context.journal.event("malformed_subject", subject=message.subject, error=str(error)[:500])
            await ignore_errors(message.term())
            return None
        row = cell.row
        is_lost = cell.field.startswith(REDELIVERY)
        again = is_lost or is_redelivery(message)
        over = self.is_below_floor(row)
        if over and not again:
            self._context.journal.event("stray_cell", subject=message.subject, error="the rows of its step are gone")
        if over or (again and not await self._still_wanted(row, message.subject)):
            await ignore_errors(message.ack())
            return None
        cells = {} if is_lost else {cell.field: message.data}
        others = [name for name in self.inputs if name != cell.field]
        done = [self._role.writes] if (is_lost or len(self.triggers) > 1) and self._role.writes else []
        columns = await asyncio.gather(
            *(self._table.get_async(self._table.subject(row, name)) for name in [*others, *done])
        )
        missing = [name for name, other in zip(others, columns, strict=False) if other is None]
        delivery = delivery_of(message)
        stored_at = delivery.stream_sequence if delivery is not None and not is_lost else 0
        if is_lost:
            inputs = zip(others, columns, strict=False)
            stored_at = max((c.sequence for name, c in inputs if c is not None and name in self.triggers), default=0)
        if missing or (done and (column := columns[-1]) is not None and column.sequence > stored_at):
            if early := sorted(IMPLIED.get(cell.field, set()) & set(missing)):
                await self._report_early(cell, early)
            await ignore_errors(message.ack())
            return None
        cells |= {name: other.data for name, other in zip(others, columns, strict=False) if other is not None}
        return Job(message, row, cells, stored_at)

    async def _report_early(self, cell: CellId, missing: list[str]) -> None:
        """Quarantine a row whose column precedes its inputs; nothing would trigger it again.

        A row without a prompt is not admitted: the trainer removes its cells. If the row is admitted before, the writer
        of the column notices that the column is older than the prompt.
        """
        row = cell.row
        if "prompt" in missing:
            error = f"column {cell.field} of a row without a prompt"
            self._context.journal.event("stray_cell", subject=self._table.subject(row, cell.field), error=error)
            return
        if row.kind == "group":
            last = await self._table.fetch_last_async("checkpoint", Checkpoint)
            self._floor = max(self._floor, last.floor if last is not None else 0)
            if row.step < self._floor:
                return
        error = f"column {cell.field} was written before {' and '.join(missing)}, which it is made of"
        await quarantine(self._context, row, 1, f"MalformedRow: {error}", "")

    async def _still_wanted(self, row: RowId, subject: str) -> bool:
        """Whether to handle a redelivered row; a row that failed too often is quarantined."""
        ends = [self._role.writes] if self._role.writes else []
        ends += FAILURES
        looked_up = [subject, *(self._table.subject(row, name) for name in ends)]
        itself, *ended = await asyncio.gather(*map(self._table.get_async, looked_up))
        # A row whose own cell is gone was purged with the floor or with an evaluated version.
        if itself is None:
            return False
        # A result that is older than its input is a stray; `Finisher` quarantines its row.
        own = len(ends) - len(FAILURES)
        is_done = any(cell is not None and cell.sequence > itself.sequence for cell in ended[:own])
        if is_done or any(map(ends_row, ended[own:])):
            return False
        failed = await self._context.state.failures(self._context.role, row)
        limits = self._context.config.supervision
        if failed.count >= limits.max_failures or failed.external_kills >= limits.max_kills:
            await quarantine(self._context, row, failed.count + failed.external_kills, failed.error, failed.traceback)
            return False
        return True

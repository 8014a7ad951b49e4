"""`/api/rows`: the groups of a step: rewards, versions, what became of each row, and whether it can be shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.connection import Connection
from broker.subjects import RowId
from relax_actors.console.picture import Picture
from relax_actors.console.query import Query
from relax_actors.monitoring.row_reader import RowReader
from relax_actors.record.groups import groups_of
from relax_actors.record.record import StepRecord
from relax_actors.record.rules import Group


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """A row of a step.

    Attributes:
        row: its id.
        end: what became of it.
        reason: reason of a dropped row, role that failed on a quarantined one; else empty.
        reward: mean reward of its samples; None if it was not scored.
        rewards: rewards of its samples.
        signal: whether its samples have different rewards; None if it was not scored.
        staleness: steps from the oldest version that sampled a token to the step; None if unknown.
        tokens: own tokens of its samples; None if unknown, as of a row that the record has not kept.
        shown: whether the table or the record has it.
        kept: whether the record has it.
        error: error of a quarantined row.
        trace: its traceback.
        requeued: whether an operator has requeued it.
    """

    row: str
    end: str
    reason: str
    reward: float | None
    rewards: list[float]
    signal: bool | None
    staleness: int | None
    tokens: int | None
    shown: bool
    kept: bool
    error: str
    trace: str
    requeued: bool


@dataclass(frozen=True, slots=True)
class RowsAnswer:
    """The rows of a step.

    Attributes:
        step: the step; None if the run has none yet.
        newest: newest step with a batch; None if there is none.
        batch: fields of its batch; empty if it has none yet.
        problem: why its rows are not known; empty if they are.
        rows: its rows.
    """

    step: int | None
    newest: int | None
    batch: dict[str, Any]
    problem: str
    rows: list[ShownGroup]


async def answer(query: Query) -> RowsAnswer:
    """Return the rows of parameter `step`, by default of the newest step that has a batch."""
    run = query.run
    picture = await run.refresh(whole=True)
    newest = max(picture.ledger.batches, default=None)
    step = query.number("step", newest)
    if step is None:
        return RowsAnswer(None, None, {}, "No step has a batch yet.", [])
    connection = await run.connection()
    return await run.within(connection, _rows(connection, run.rows, picture, step, newest))


async def _rows(
    connection: Connection, reader: RowReader, picture: Picture, step: int, newest: int | None
) -> RowsAnswer:
    record = reader.record
    kept = set() if record is None else set(record.rows("group", step))
    cells = await reader.step(connection, "group", step)
    step_record = None if record is None else record.step(step)
    batch = picture.ledger.batches.get(step)
    # Of a step that the table still has, it knows most: a row may have ended after the step was recorded.
    if any("prompt" in {cell.field for cell in parts} for parts in cells.values()) or step_record is None:
        by_index = {row.index: {cell.field: cell for cell in parts} for row, parts in cells.items()}
        groups = groups_of(step, by_index, None if batch is None else batch.rows, reader.resolver())
        facts = {} if batch is None else {"reward": batch.reward, "staleness": batch.staleness, "tokens": batch.tokens}
        step_record = StepRecord(step, groups, facts)
    requeued = {row for row, parts in cells.items() if any(cell.field == "requeued" for cell in parts)}
    problem = (
        "" if step_record.groups and not _is_gone(step_record, cells, kept) else _problem(picture, step, step_record)
    )
    rows = []
    for group in step_record.groups:
        row = RowId(step, group.index)
        rows.append(_shown(group, row, picture, in_table=row in cells, is_kept=row in kept, requeued=row in requeued))
    return RowsAnswer(step, newest, step_record.batch, problem, rows)


def _is_gone(step_record: StepRecord, cells: object, kept: set[RowId]) -> bool:
    return step_record.collected and not cells and not kept


def _problem(picture: Picture, step: int, step_record: StepRecord) -> str:
    if step_record.collected:
        return "A checkpoint removed the rows of this step before the record could keep them."
    if step in picture.ledger.batches:
        return "The rows of this step are collected, and the run has no record of it; see [record]."
    return "This step has no rows yet."


def _shown(group: Group, row: RowId, picture: Picture, *, in_table: bool, is_kept: bool, requeued: bool) -> ShownGroup:
    failed = picture.quarantined.get(row)
    return ShownGroup(
        row=str(row),
        end=group.end.value,
        reason=group.reason,
        reward=group.reward,
        rewards=list(group.rewards),
        signal=len(set(group.rewards)) > 1 if group.rewards else None,
        staleness=None if group.oldest is None else row.step - group.oldest,
        tokens=group.tokens,
        shown=in_table or is_kept,
        kept=is_kept,
        error="" if failed is None else failed.error,
        trace="" if failed is None else failed.traceback,
        requeued=requeued,
    )

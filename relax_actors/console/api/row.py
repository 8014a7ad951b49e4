"""`/api/row`: everything about a row; the tokens of one of its samples."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from broker.subjects import RowId
from relax_actors.console.errors import RequestError
from relax_actors.console.picture import Event
from relax_actors.console.query import Query
from relax_actors.errors import SubjectError
from relax_actors.record.row_cells import RowCells
from relax_actors.record.row_detail import RowDetail, TokenStrip, detail_of
from relax_actors.runtime.row import parse_row

MAX_TOKENS = 5000
"""Tokens of a sequence in one answer."""
MAX_EVENTS = 100


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """A row.

    Attributes:
        detail: the row; only the sample `sample` has tokens, and of each sequence those from `first` on.
        sample: index of the sample.
        first: first token.
        lengths: tokens of each sequence of the sample.
        step: step that trains the row, or version that it evaluates.
        trained: whether the batch of the step trains it; None if the step has no batch yet.
        events: newest events that name the row, such as the death of an actor that handled it, in their order.
    """

    detail: RowDetail
    sample: int
    first: int
    lengths: list[int]
    step: int
    trained: bool | None
    events: list[Event]


async def answer(query: Query) -> RowAnswer:
    """Return the row of parameter `row`, with the tokens of `sample` from `first` on."""
    row, cells = await row_of(query)
    sample, first = query.number("sample", 0) or 0, query.number("first", 0) or 0
    detail = await asyncio.to_thread(detail_of, cells, query.run.rows.spell, tokens_of=sample)
    strips = detail.samples[sample].strips if sample < len(detail.samples) else []
    lengths = [len(strip.ids) for strip in strips]
    if strips:
        samples = list(detail.samples)
        samples[sample] = replace(samples[sample], strips=[_part(strip, first) for strip in strips])
        detail = replace(detail, samples=samples)
    batch = query.run.picture.ledger.batches.get(row.step) if row.kind == "group" else None
    events = [event for event in query.run.picture.events if _names(event, str(row))][-MAX_EVENTS:]
    trained = None if batch is None else row.index in batch.rows
    return RowAnswer(detail, sample, first, lengths, row.step, trained, events)


def _names(event: Event, row: str) -> bool:
    """Whether an event names a row; a list of rows is that of a process that ended."""
    rows = event.body.get("rows")
    return event.body.get("row") == row or (isinstance(rows, list) and row in rows)


async def row_of(query: Query) -> tuple[RowId, RowCells]:
    """Return the row that a request names; raises RequestError if neither the table nor the record has it."""
    try:
        row = parse_row(query.text("row"))
    except SubjectError as error:
        raise RequestError(400, str(error), "invalid_parameter") from error
    run = query.run
    await run.refresh(whole=True)
    connection = await run.connection()
    cells = await run.within(connection, run.rows.row(connection, row))
    if cells is None:
        msg = (
            f"row {row} is collected and was not kept, or does not exist. record.every = 1 keeps all rows of a run, "
            "within record.max_mib"
        )
        raise RequestError(404, msg, "unknown_row")
    return row, cells


def _part(strip: TokenStrip, first: int) -> TokenStrip:
    """Return the tokens from `first` on, as many as one answer holds."""
    part = slice(first, first + MAX_TOKENS)
    return replace(
        strip,
        ids=strip.ids[part],
        texts=strip.texts[part],
        mask=strip.mask[part],
        versions=strip.versions[part],
        numbers={name: values[part] for name, values in strip.numbers.items()},
    )

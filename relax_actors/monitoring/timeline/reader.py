"""Timelines of a run, read from its broker as an observer."""

from __future__ import annotations

from broker.connection import Connection
from broker.history import History
from broker.subjects import CellId, RowId
from relax_actors.errors import ConfigError
from relax_actors.monitoring.log_message import LogMessage
from relax_actors.monitoring.row_reader import RowReader
from relax_actors.monitoring.timeline.builder import Builder
from relax_actors.monitoring.timeline.span import Timeline
from relax_actors.record.row_cells import RowCells
from relax_actors.record.row_turns import turns_of

NUMBERED = ("batch", "weights", "checkpoint", "critic_checkpoint", "evaluation")
MAX_MESSAGES = 50_000
"""Messages at the end of the log that are read."""


async def read_timeline(connection: Connection, rows: RowReader) -> Timeline:
    """Return the run's timeline: rows of the table, and all steps."""
    builder = Builder(rows.subjects.run)
    for subject in [f"{rows.subjects.prefix}.{kind}.*.*.*" for kind in ("group", "eval")]:
        async for cell in rows.each(connection, subject):
            builder.take_cell(rows.subjects.parse(cell.subject), cell.stored, cell.data)
    await _read_numbered(connection, rows, builder, "*")
    await _read_log(connection, rows, builder)
    return builder.timeline()


async def read_step(connection: Connection, rows: RowReader, step: int, message: LogMessage | None = None) -> Timeline:
    """Return a step's timeline: its rows, and what the trainer did.

    If the metric of the step is given, the log is not read, there are no events, and samples of several turns have
    spans of their own.

    Raises:
        ConfigError: nothing of the step is left, or it has not begun.
    """
    builder = Builder(rows.subjects.run)
    stored = await rows.step(connection, "group", step)
    kept = set([] if rows.record is None else rows.record.rows("group", step))
    for row in sorted(stored.keys() | kept):
        known = RowCells(row, stored.get(row, []))
        cells = known if "prompt" in known.cells else await rows.row(connection, row)
        if cells is not None:
            _take_row(builder, cells)
            if message is not None:
                _take_turns(builder, cells)
    await _read_numbered(connection, rows, builder, step, step + 1)
    if message is None:
        await _read_log(connection, rows, builder)
    else:
        builder.take_message(message, 0.0)
    return within(builder.timeline(), step, f"step {step}")


async def read_row(connection: Connection, rows: RowReader, row: RowId, session: int | None = None) -> Timeline:
    """Return a row's timeline, with lanes of samples with turns, or of `session`.

    Raises:
        ConfigError: neither the table nor the record has it, or the sample has no turns.
    """
    builder = Builder(rows.subjects.run)
    cells = await rows.row(connection, row)
    if cells is None:
        msg = f"neither the table nor the record has {row}; record.every = 1 keeps all rows"
        raise ConfigError(msg)
    _take_row(builder, cells)
    if not _take_turns(builder, cells, session) and session is not None:
        msg = f"sample {session} of {row} has no turns in the table or the record: only samples of several turns do"
        raise ConfigError(msg)
    await _read_numbered(connection, rows, builder, row.step, row.step + 1)
    await _read_log(connection, rows, builder)
    return within(builder.timeline(), row.step, str(row))


def within(timeline: Timeline, step: int, what: str) -> Timeline:
    """Return the spans and instants of a step; raises ConfigError if none."""
    spans = tuple(span for span in timeline.spans if span.step == step)
    if not spans:
        msg = f"nothing of {what} is left in the table and the record, or it has not begun; record.every = 1 keeps all"
        raise ConfigError(msg)
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    instants = tuple(instant for instant in timeline.instants if begin <= instant.time <= end)
    return Timeline(timeline.run, spans, instants)


def _take_row(builder: Builder, cells: RowCells) -> None:
    row = cells.row
    for cell in cells.cells.values():
        if "." not in cell.field:  # turns are part of the trajectory
            builder.take_cell(CellId(row.kind, row.step, row.index, cell.field), cell.stored, cell.data)


def _take_turns(builder: Builder, cells: RowCells, session: int | None = None) -> int:
    """Record the turns of a row, or those of one sample; return how many there are."""
    prompt, count = cells.cells.get("prompt"), 0
    begun = 0.0 if prompt is None else prompt.stored
    for turn in turns_of(cells):
        if session is None or turn.sample == session:
            tools, count = ", ".join(str(call.get("name")) for call in turn.calls), count + 1
            facts: dict[str, str | int] = {"tokens": turn.tokens, "tools": tools}
            builder.take_turn(cells.row, (turn.sample, turn.attempt, turn.number), begun, turn.time, facts)
    return count


async def _read_numbered(connection: Connection, rows: RowReader, builder: Builder, *numbers: int | str) -> None:
    for kind in NUMBERED:
        for number in numbers:
            async for cell in rows.each(connection, rows.subjects.numbered(kind, number)):
                builder.take_cell(rows.subjects.parse(cell.subject), cell.stored, cell.data)


async def _read_log(connection: Connection, rows: RowReader, builder: Builder) -> None:
    subjects, stream = rows.subjects, rows.subjects.log_stream
    last = await History(connection, stream, ">").last()
    start = 1 if last is None else max(1, last.sequence - MAX_MESSAGES)
    for subject in (subjects.event("*", "*", "*"), subjects.metric("trainer", "*")):
        history = History(connection, stream, subject, start)
        while page := await history.page():
            for cell in page:
                if (message := LogMessage.parse(cell.subject, cell.data)) is not None:
                    builder.take_message(message, cell.stored)

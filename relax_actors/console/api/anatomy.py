"""`/api/anatomy`: a lane for each sample of a step, from the admission of its row to the step that trained it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from broker.connection import Connection
from relax_actors.console.picture import Picture
from relax_actors.console.query import Query
from relax_actors.console.run import ConsoleRun
from relax_actors.record.row_cells import RowCells
from relax_actors.record.row_detail import RowDetail, detail_of

NAMES = {"trajectory": "wait and generate", "dropped": "dropped", "quarantined": "quarantined"}
"""What ends with a cell of a column; other columns are named after themselves."""


@dataclass(frozen=True, slots=True)
class Span:
    """Time until a cell was stored, by the broker's clock.

    Attributes:
        name: what happened.
        begin: Unix time in seconds at which the cell before it was stored.
        end: Unix time in seconds at which its cell was stored.
        actor: actor that wrote the cell; empty for the wait for the step.
        sequence: stream sequence of the cell; 0 for the wait for the step.
    """

    name: str
    begin: float
    end: float
    actor: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Lane:
    """A sample of a row.

    Attributes:
        row: id of the row.
        sample: index of the sample.
        spans: what happened to the row, in order.
        turns: times at which turns of the sample were stored, with the number of the turn and the tools it called.
        versions: tokens by the version that sampled them, oldest first.
        reward: its reward; None if it was not scored.
        tokens: its own tokens.
        trained: how many of them are trained.
        finish_reason: why it ended.
    """

    row: str
    sample: int
    spans: list[Span]
    turns: list[dict[str, Any]]
    versions: list[tuple[int, int]]
    reward: float | None
    tokens: int
    trained: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class AnatomyAnswer:
    """The lanes of a step; `missing` counts its rows that neither the table nor the record has."""

    step: int | None
    newest: int | None
    lanes: list[Lane]
    missing: int


async def answer(query: Query) -> AnatomyAnswer:
    """Return the lanes of parameter `step`, by default of the newest step that has a batch."""
    run = query.run
    picture = await run.refresh(whole=True)
    newest = max(picture.ledger.batches, default=None)
    step = query.number("step", newest)
    if step is None:
        return AnatomyAnswer(None, None, [], 0)
    connection = await run.connection()
    rows = await run.within(connection, _rows(connection, run, step))
    batch = picture.ledger.batches.get(step)
    at = await run.within(connection, _stored(connection, run, step)) if batch is not None else 0.0
    known = {row.row.index for row in rows}
    missing = 0 if batch is None else len([index for index in batch.rows if index not in known])
    lanes = await asyncio.to_thread(lambda: [lane for row in rows for lane in _lanes(row, picture, at)])
    return AnatomyAnswer(step, newest, lanes, missing)


async def _rows(connection: Connection, run: ConsoleRun, step: int) -> list[RowCells]:
    """Return the rows of a step that the table or the record has, in order."""
    cells = await run.rows.step(connection, "group", step)
    names = set(cells) | set([] if run.rows.record is None else run.rows.record.rows("group", step))
    rows = []
    for row in sorted(names):
        parts = cells.get(row, [])
        if any(cell.field in ("prompt", "trajectory") for cell in parts):
            rows.append(RowCells(row, parts, run.rows.resolver()))
        elif (kept := await run.rows.row(connection, row)) is not None:
            rows.append(kept)
    return rows


async def _stored(connection: Connection, run: ConsoleRun, step: int) -> float:
    """Return when the batch of a step was stored."""
    cells = await run.rows.read(connection, run.subjects.numbered("batch", step))
    return cells[-1].stored if cells else 0.0


def _lanes(cells: RowCells, picture: Picture, at: float) -> list[Lane]:
    detail = detail_of(cells, tokens_of=-1)
    batch = picture.ledger.batches.get(cells.row.step)
    is_trained = batch is not None and cells.row.index in batch.rows
    spans = _spans(detail, at if is_trained else 0.0)
    if not detail.samples:
        return [Lane(str(cells.row), 0, spans, [], [], None, 0, 0, detail.end.get("column", ""))]
    return [
        Lane(
            row=str(cells.row),
            sample=i,
            spans=spans,
            turns=[
                {
                    "number": turn.number,
                    "time": turn.time,
                    "actor": turn.author,
                    "calls": [c["name"] for c in turn.calls],
                }
                for turn in sample.turns
            ],
            versions=sorted(sample.versions.items()),
            reward=sample.reward,
            tokens=sample.tokens,
            trained=sample.trained if is_trained else 0,
            finish_reason=sample.finish_reason,
        )
        for i, sample in enumerate(detail.samples)
    ]


def _spans(detail: RowDetail, at: float) -> list[Span]:
    parts = [part for part in detail.parts if part.time and "." not in part.column]
    spans = [
        Span(NAMES.get(part.column, part.column), before.time, part.time, part.author, part.sequence)
        for before, part in pairwise(parts)
    ]
    if parts and at > parts[-1].time:
        spans.append(Span("wait for the step", parts[-1].time, at, "", 0))
    return spans

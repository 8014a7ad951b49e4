"""Turn cells of rows: written while a row is generated, and read by the actor that takes the row over.

A cell holds the turns of a row's samples that ended together. An actor writes the cells of its own attempt at the row,
numbered from 0. Each turn names what came before it, so that a reader never mixes the turns of two actors, of which one
was taken for dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from broker.subjects import TURNS, RowId
from broker.table import CALL_DEADLINE, Table
from relax_actors.errors import CodecError, StoreError, SubjectError
from relax_actors.messages import Turn, Turns
from relax_actors.training.episode import Episode

MAX_UNWRITTEN = 64
"""Cells that may wait for the server's acknowledgement before an actor waits for the oldest."""


class TurnLog:
    """Turn cells that an actor writes for one row. Used from the role's thread.

    Args:
        table: table of the run.
        row: the row.
        attempt: number of the attempt; that of the last one plus 1.
    """

    def __init__(self, table: Table, row: RowId, attempt: int = 0) -> None:
        self._table, self._row, self._attempt = table, row, attempt
        self._written, self._seconds = 0, 0.0
        self._waiting: list[Turn] = []
        self._writes: list[Future[None]] = []

    def add(self, turn: Turn) -> None:
        """Add a turn to the next cell."""
        self._waiting.append(turn)

    def flush(self, seconds: float = 0.0) -> None:
        """Write the turns that were added, without waiting for the server.

        Args:
            seconds: time that actors have spent on the row.

        Raises:
            BrokerError: an earlier cell could not be written.
        """
        if not self._waiting:
            return
        turns, self._waiting, self._seconds = self._waiting, [], seconds
        self._write_all(turns)
        while self._writes and (self._writes[0].done() or len(self._writes) > MAX_UNWRITTEN):
            self._writes.pop(0).result(CALL_DEADLINE)

    def _write_all(self, turns: Sequence[Turn]) -> None:
        """Write turns as one cell, or as several if they are too large for one."""
        try:
            data = self._table.encode(self._subject(self._attempt, self._written), Turns(list(turns), self._seconds))
        except CodecError:
            # A single turn that no cell can hold is generated again after a crash.
            half = len(turns) // 2
            for part in (turns[:half], turns[half:]) if half else ():
                self._write_all(part)
            return
        work = self._write(data, self._written)
        self._writes.append(asyncio.run_coroutine_threadsafe(work, self._table.connection.loop))
        self._written += 1

    async def _write(self, data: bytes, k: int) -> None:
        """Write a cell; if another actor has written it, in the next attempt that is free."""
        while not await self._table.put_async(self._subject(self._attempt, k), data):
            self._attempt += 1

    def _subject(self, attempt: int, k: int) -> str:
        return self._table.subjects.turn(self._row, attempt, k)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the turn cells of a row hold.

    Attributes:
        turns: in the order written.
        attempt: number of the next attempt at the row.
        seconds: time that actors have spent on the row.
    """

    turns: list[Turn]
    attempt: int
    seconds: float = 0.0


def read_turns(table: Table, rows: Iterable[RowId]) -> dict[RowId, Recorded]:
    """Read the turns of rows.

    Cells that are malformed, or whose arrays are lost, are skipped: their turns are generated again.
    """
    return table.call(_read_all(table, list(rows)))


async def _read_all(table: Table, rows: Sequence[RowId]) -> dict[RowId, Recorded]:
    found = await asyncio.gather(*(_read(table, row) for row in rows))
    return dict(zip(rows, found, strict=True))


async def _read(table: Table, row: RowId) -> Recorded:
    places: list[tuple[int, int]] = []
    for subject in await table.list_subjects_async(table.subjects.turn(row, "*", "*")):
        with suppress(SubjectError):
            attempt, k = table.subjects.parse(subject).field.removeprefix(f"{TURNS}.").split(".")
            places.append((int(attempt), int(k)))
    places.sort()
    cells = await asyncio.gather(*(table.get_async(table.subjects.turn(row, *place)) for place in places))
    found: list[Turns] = []
    for cell in cells:
        with suppress(CodecError, StoreError):
            found += [] if cell is None else [table.read(cell.data, Turns)]
    turns = [turn for one in found for turn in one.turns]
    return Recorded(turns, places[-1][0] + 1 if places else 0, max((one.seconds for one in found), default=0.0))


def repeat_turns(episodes: Sequence[Episode], turns: Iterable[Turn]) -> int:
    """Bring episodes to where their turns end; return the number of turns that were taken."""
    return sum(turn.sample < len(episodes) and episodes[turn.sample].repeat(turn) for turn in turns)

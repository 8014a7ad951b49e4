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

from broker.subjects import TURNS, RowId
from broker.table import CALL_DEADLINE, Table
from relax_actors.errors import CodecError, StoreError, SubjectError
from relax_actors.messages import Turn, Turns
from relax_actors.training.episode import Episode

MAX_UNWRITTEN = 64
"""Cells that may wait for the server's acknowledgement before an actor waits for the oldest."""
MAX_ATTEMPTS = 1000


class TurnLog:
    """Turn cells that an actor writes for one row. Used from the role's thread.

    Args:
        table: table of the run.
        row: the row.
        attempt: number of the attempt; that of the last one plus 1.
    """

    def __init__(self, table: Table, row: RowId, attempt: int = 0) -> None:
        self._table, self._row, self._attempt = table, row, attempt
        self._written = 0
        self._waiting: list[Turn] = []
        self._writes: list[Future[None]] = []

    def add(self, turn: Turn) -> None:
        """Add a turn to the next cell."""
        self._waiting.append(turn)

    def flush(self) -> None:
        """Write the turns that were added, without waiting for the server.

        Raises:
            BrokerError: an earlier cell could not be written.
        """
        if not self._waiting:
            return
        turns, self._waiting = self._waiting, []
        data = self._table.encode(self._subject(self._attempt, self._written), Turns(turns))
        work = self._write(data, self._written)
        self._writes.append(asyncio.run_coroutine_threadsafe(work, self._table.connection.loop))
        self._written += 1
        while self._writes and (self._writes[0].done() or len(self._writes) > MAX_UNWRITTEN):
            self._writes.pop(0).result(CALL_DEADLINE)

    async def _write(self, data: bytes, k: int) -> None:
        """Write a cell; if another actor has written it, in the next attempt that is free."""
        while not await self._table.put_async(self._subject(self._attempt, k), data):
            self._attempt += 1

    def _subject(self, attempt: int, k: int) -> str:
        return self._table.subjects.turn(self._row, attempt, k)


def read_turns(table: Table, rows: Iterable[RowId]) -> dict[RowId, tuple[list[Turn], int]]:
    """Read the turns of rows in the order written, and the number of the next attempt at each row.

    Cells that are malformed, or whose arrays are lost, are skipped: their turns are generated again.
    """
    return table.call(_read_all(table, list(rows)))


async def _read_all(table: Table, rows: Sequence[RowId]) -> dict[RowId, tuple[list[Turn], int]]:
    found = await asyncio.gather(*(_read(table, row) for row in rows))
    return dict(zip(rows, found, strict=True))


async def _read(table: Table, row: RowId) -> tuple[list[Turn], int]:
    places: list[tuple[int, int]] = []
    for subject in await table.list_subjects_async(table.subjects.turn(row, "*", "*")):
        with suppress(SubjectError):
            attempt, k = table.subjects.parse(subject).field.removeprefix(f"{TURNS}.").split(".")
            places.append((int(attempt), int(k)))
    places.sort()
    cells = await asyncio.gather(*(table.get_async(table.subjects.turn(row, *place)) for place in places))
    turns: list[Turn] = []
    for cell in cells:
        with suppress(CodecError, StoreError):
            turns += [] if cell is None else table.read(cell.data, Turns).turns
    return turns, places[-1][0] + 1 if places else 0


def repeat_turns(episodes: Sequence[Episode], turns: Iterable[Turn]) -> int:
    """Bring episodes to where their turns end; return the number of turns that were taken."""
    return sum(turn.sample < len(episodes) and episodes[turn.sample].repeat(turn) for turn in turns)

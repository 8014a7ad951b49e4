"""Log of a row's samples: cells `turns.0.<k>`, from which the next actor continues.

Invariant: with agents, a row's log has one writer at a time. An actor appends a cell as it takes a row over; the former
one, which was presumed dead but may still run, then finds its next place taken and writes no more. So what an actor has
read is all that came before its own cells, and numbers of turns mean the same to every reader. A writer whose newest
cell is gone writes no more either: the row has ended, and its cells were removed. Episodes can be played again, so
their turns may be written late, and beside those of another actor, which readers tell apart.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from broker.subjects import RowId
from broker.table import CALL_DEADLINE, Table
from relax_actors.errors import CodecError, RowTakenError, StoreError, SubjectError
from relax_actors.messages.session_log import SessionLog, SessionState, SessionStep, SessionTurn

if TYPE_CHECKING:
    from relax_actors.sessions.episode import Episode
    from relax_actors.sessions.session_book import Session

ATTEMPT = 0
"""Attempt in the subjects of all cells: one log for all actors."""
MAX_UNWRITTEN = 64
"""Cells that may wait for the server's acknowledgement before an actor waits for the oldest."""


class LogWriter:
    """Appends to the log of one row, cell by cell, in the event loop's thread.

    `length` cells are in the log; `checks_last` has it check before each cell that the log was not removed.
    """

    def __init__(self, table: Table, row: RowId, length: int, *, checks_last: bool = True) -> None:
        self._table, self._row, self._length, self._checks_last = table, row, length, checks_last
        self._lock = asyncio.Lock()

    async def write(self, cell: SessionLog) -> None:
        """Append a cell; returns when the broker has it.

        Raises:
            RowTakenError: another actor has appended to the log, or the log was removed.
            BrokerError: the cell cannot be written; CodecError: it is too large.
        """
        async with self._lock:
            encoding = asyncio.to_thread(self._table.encode, self._next, cell)
            data, _ = await asyncio.gather(encoding, self._check_last())
            # A refused cell may be this one, if its acknowledgement was lost with a connection.
            if not await self._table.put_async(self._next, data) and await self._find_next() != data:
                raise self._taken()
            self._length += 1

    def skip(self) -> None:
        """Go on behind a cell that another actor has written."""
        self._length += 1

    async def check(self) -> None:
        """Raise RowTakenError if another actor has appended to the log, or it was removed."""
        async with self._lock:
            cell, _ = await asyncio.gather(self._find_next(), self._check_last())
            if cell is not None:
                raise self._taken()

    @property
    def _next(self) -> str:
        return self._place(self._length)

    def _place(self, number: int) -> str:
        return self._table.subjects.turn(self._row, ATTEMPT, number)

    async def _find_next(self) -> bytes | None:
        cell = await self._table.get_async(self._next, direct=False)
        return None if cell is None else cell.data

    async def _check_last(self) -> None:
        """Check that the newest cell still exists: places of a log that was removed are free again."""
        if (
            self._checks_last
            and self._length
            and await self._table.get_async(self._place(self._length - 1), direct=False) is None
        ):
            msg = f"the log of {self._row} was removed, because the row has ended; take another sample"
            raise RowTakenError(msg)

    def _taken(self) -> RowTakenError:
        return RowTakenError(f"another actor has taken {self._row} over; send the request again")


async def read_log(table: Table, row: RowId) -> tuple[list[SessionLog], int]:
    """Read the log of a row; return its cells, and the number of the next one.

    Malformed cells, and those whose arrays are lost, are skipped: the turns behind theirs are generated again.
    """
    numbers = []
    for subject in await table.list_subjects_async(table.subjects.turn(row, ATTEMPT, "*")):
        with suppress(SubjectError):
            numbers.append(int(table.subjects.parse(subject).field.rpartition(".")[2]))
    places = [table.subjects.turn(row, ATTEMPT, k) for k in sorted(numbers)]
    cells = await asyncio.gather(*(table.get_async(place, direct=False) for place in places))
    logs = []
    for cell in cells:
        with suppress(CodecError, StoreError):
            if cell is not None:
                logs.append(table.read(cell.data, SessionLog, resolve=table.store.reader()))
    return logs, max(numbers, default=-1) + 1


async def read_logs(table: Table, rows: Sequence[RowId]) -> dict[RowId, tuple[list[SessionLog], int]]:
    """Read the logs of rows; see `read_log`."""
    return dict(zip(rows, await asyncio.gather(*(read_log(table, row) for row in rows)), strict=True))


async def take_log(table: Table, row: RowId) -> tuple[list[SessionLog], LogWriter]:
    """Take over the log of a row; return its cells, and a writer for further cells.

    Where cells are lost, the agent's next request begins a tree of its own.
    """
    while True:
        logs, length = await read_log(table, row)
        writer = LogWriter(table, row, length)
        try:
            await writer.write(SessionLog())
        except RowTakenError:
            continue  # the former actor was faster
        return logs, writer


class LazyLog:
    """Log of a row whose work is repeatable: additions wait for `flush`, which never waits.

    Used from one thread. Where another actor has taken a place, the next free one follows: digests of what came before
    keep the turns of two actors apart (`SessionTurn.before`).
    """

    def __init__(self, table: Table, row: RowId, length: int = 0) -> None:
        self._table, self._row = table, row
        self._writer = LogWriter(table, row, length, checks_last=False)
        self._cell = SessionLog()
        self._writes: deque[Future[None]] = deque()
        self._order = asyncio.Lock()

    def add(self, one: SessionTurn | SessionState) -> None:
        """Add a turn or a state to the next cell."""
        if isinstance(one, SessionTurn):
            self._cell.turns.append(one)
        else:
            self._cell.states.append(one)

    def flush(self, seconds: float = 0.0) -> None:
        """Write additions with the seconds spent on the row; raises BrokerError."""
        if not (self._cell.turns or self._cell.states):
            return
        cell, self._cell = replace(self._cell, seconds=seconds), SessionLog()
        loop = self._table.connection.loop
        self._writes.append(asyncio.run_coroutine_threadsafe(self._write_in_order(cell), loop))
        while self._writes and (self._writes[0].done() or len(self._writes) > MAX_UNWRITTEN):
            self._writes.popleft().result(CALL_DEADLINE)

    async def _write_in_order(self, cell: SessionLog) -> None:
        async with self._order:
            await self._write(cell)

    async def _write(self, cell: SessionLog) -> None:
        """Write a cell, or several if it is too large for one."""
        try:
            while True:
                try:
                    return await self._writer.write(cell)
                except RowTakenError:
                    self._writer.skip()
        except CodecError:
            # A single turn that no cell can hold, and those behind it, are generated again after a crash.
            half = len(cell.turns) // 2
            for turns in (cell.turns[:half], cell.turns[half:]) if half else ():
                await self._write(SessionLog(turns, seconds=cell.seconds))
            if cell.states and cell.turns:
                await self._write(SessionLog(states=cell.states, seconds=cell.seconds))


class HeldLogs:
    """Logs of the rows that an actor holds. All coroutines run in the event loop's thread.

    `on_taken` is called when a row turns out to be another actor's.
    """

    def __init__(self, table: Table, on_taken: Callable[[RowId], None]) -> None:
        self._table, self._on_taken = table, on_taken
        self._writers: dict[RowId, LogWriter] = {}
        self._taken: dict[RowId, RowTakenError] = {}

    def __contains__(self, row: RowId) -> bool:
        return row in self._writers

    async def take(self, row: RowId) -> list[SessionLog]:
        """Take the log of a row over, and return its cells."""
        logs, self._writers[row] = await take_log(self._table, row)
        return logs

    @asynccontextmanager
    async def holding(self, row: RowId) -> AsyncIterator[LogWriter]:
        """Return the writer of a row; raises RowTakenError, and releases it, if it is taken."""
        if (writer := self._writers.get(row)) is None:
            raise released(row)
        try:
            yield writer
        except RowTakenError as error:
            # The row may have been delivered to this actor again, and then has another writer.
            if self._writers.get(row) is writer:
                del self._writers[row]
                self._taken[row] = error
                self._on_taken(row)
            raise

    def release(self, row: RowId) -> RowTakenError | None:
        """Forget a row; return why it was not held any more."""
        self._writers.pop(row, None)
        return self._taken.pop(row, None)


def released(row: RowId) -> RowTakenError:
    """Return the error of a request to a row that this actor has released."""
    return RowTakenError(f"{row} was released; send the request again")


def restore(sessions: Sequence[Session] | Sequence[Episode], logs: Sequence[SessionLog]) -> int:
    """Bring new sessions to where the logs end; return the number of turns that were taken."""
    taken = 0
    for log in logs:
        records: list[SessionTurn | SessionStep | SessionState] = [*log.turns, *log.steps, *log.states]
        for written in records:
            if written.sample < len(sessions) and sessions[written.sample].repeat(written):
                taken += isinstance(written, SessionTurn)
    return taken

"""Log of the sessions of a row: cells `turns.0.<k>`, from which an actor that takes the row over goes on.

Invariant: a row has one log, and one writer at a time. An actor that takes the row over appends a cell first; the
former one, which was presumed dead but may still run, then finds its next place taken and writes no more. So what an
actor has read is all that came before its own cells, and numbers of turns mean the same to every reader. A writer
whose own newest cell is gone writes no more either: the row has ended, and its cells were removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from broker.subjects import RowId
from broker.table import Table
from relax_actors.errors import CodecError, RowTakenError, StoreError, SubjectError
from relax_actors.messages.session_log import SessionLog, SessionState, SessionTurn
from relax_actors.serving.forest import Turn
from relax_actors.serving.session_book import Session

ATTEMPT = 0
"""Attempt in the subjects of all cells: one log for all actors."""


class LogWriter:
    """Appends to the log of one row, one cell after the other. All coroutines run in the event loop's thread.

    Args:
        table: table of the run.
        row: the row.
        length: cells in the log.
    """

    def __init__(self, table: Table, row: RowId, length: int) -> None:
        self._table, self._row, self._length = table, row, length
        self._lock = asyncio.Lock()

    async def write(self, turns: Sequence[SessionTurn] = (), states: Sequence[SessionState] = ()) -> None:
        """Append a cell; returns when the broker has it.

        Raises:
            RowTakenError: another actor has appended to the log, or the log was removed.
            BrokerError: the cell cannot be written; CodecError: it is too large.
        """
        async with self._lock:
            cell = SessionLog(list(turns), list(states))
            encoding = asyncio.to_thread(self._table.encode, self._next, cell)
            data, _ = await asyncio.gather(encoding, self._check_last())
            # A refused cell may be this one, if its acknowledgement was lost with a connection.
            if not await self._table.put_async(self._next, data) and await self._find_next() != data:
                raise self._taken()
            self._length += 1

    async def check(self) -> None:
        """Check that no other actor has appended to the log, and that it was not removed.

        Raises:
            RowTakenError: one has, or it was.
        """
        async with self._lock:
            found, _ = await asyncio.gather(self._find_next(), self._check_last())
            if found is not None:
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
        if self._length and await self._table.get_async(self._place(self._length - 1), direct=False) is None:
            msg = f"the log of {self._row} was removed, because the row has ended; take another sample"
            raise RowTakenError(msg)

    def _taken(self) -> RowTakenError:
        return RowTakenError(f"another actor has taken {self._row} over; send the request again")


async def take_log(table: Table, row: RowId) -> tuple[list[SessionLog], LogWriter]:
    """Take the log of a row over from the actor that wrote it before; return its cells, and the writer of further ones.

    Malformed cells are skipped: their turns are lost, and the agent's next request begins a tree of its own.
    """
    every = table.subjects.turn(row, ATTEMPT, "*")
    while True:
        numbers = []
        for subject in await table.list_subjects_async(every):
            with suppress(SubjectError):
                numbers.append(int(table.subjects.parse(subject).field.rpartition(".")[2]))
        places = [table.subjects.turn(row, ATTEMPT, k) for k in sorted(numbers)]
        cells = await asyncio.gather(*(table.get_async(place, direct=False) for place in places))
        writer = LogWriter(table, row, max(numbers, default=-1) + 1)
        try:
            await writer.write()
        except RowTakenError:
            continue  # the former actor was faster
        found = []
        for cell in cells:
            with suppress(CodecError, StoreError):
                if cell is not None:
                    found.append(table.read(cell.data, SessionLog, resolve=table.store.reader()))
        return found, writer


class HeldLogs:
    """Logs of the rows that an actor holds. All coroutines run in the event loop's thread.

    Args:
        table: table of the run.
        on_taken: called when a row turns out to be another actor's.
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
        """Give the writer of a row, and release the row if another actor has taken it.

        Raises:
            RowTakenError: another actor has the row, or it was released.
        """
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
    """Return the error of a request to a row that this actor has released, or that was delivered to it again."""
    return RowTakenError(f"{row} was released; send the request again")


def restore(sessions: Sequence[Session], logs: Sequence[SessionLog]) -> None:
    """Bring new sessions to where the logs end. Turns behind one that is lost are left out: they may continue it."""
    for log in logs:
        for turn in log.turns:
            forest = sessions[turn.sample].forest if turn.sample < len(sessions) else None
            if forest is not None and turn.number == len(forest.turns) > turn.parent:
                forest.add(turn_of(turn), is_used=sessions[turn.sample].state is None)
        for state in log.states:
            if state.sample >= len(sessions):
                continue
            session = sessions[state.sample]
            if state.reason:
                session.enter_end(state)
            elif state.attempt > session.attempt:
                session.begin_again(state)


def turn_of(turn: SessionTurn) -> Turn:
    """Return the turn of a forest that a cell holds."""
    return Turn(
        turn.parent,
        turn.asked,
        turn.state,
        turn.observed,
        turn.tokens,
        turn.logprobs,
        turn.versions,
        turn.finish_reason,
        turn.call,
        tuple(turn.messages),
    )


def cell_of(sample: int, number: int, turn: Turn) -> SessionTurn:
    """Return what a cell holds of a turn."""
    return SessionTurn(
        sample,
        number,
        turn.parent,
        turn.asked,
        turn.state,
        turn.observed,
        turn.tokens,
        turn.logprobs,
        turn.versions,
        turn.finish_reason,
        turn.call,
        list(turn.messages),
    )

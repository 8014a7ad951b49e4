"""Reads and writes the cells of sessions, from which an actor that takes a row over goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from broker.subjects import TURNS, RowId
from broker.table import Table
from relax_actors.errors import CodecError, StoreError, SubjectError
from relax_actors.messages.session_log import SessionLog, SessionState, SessionTurn
from relax_actors.serving.forest import Turn
from relax_actors.serving.session_book import Session


class LogWriter:
    """Writes the cells of one row, one after the other. All coroutines run in the event loop's thread.

    Args:
        table: table of the run.
        row: the row.
        attempt: number of this actor's attempt at the row.
    """

    def __init__(self, table: Table, row: RowId, attempt: int) -> None:
        self._table, self._row, self._attempt, self._count = table, row, attempt, 0
        self._lock = asyncio.Lock()

    async def write(self, turns: Sequence[SessionTurn] = (), states: Sequence[SessionState] = ()) -> None:
        """Write a cell; returns when the broker has it.

        Raises:
            BrokerError: it cannot be written; CodecError: it is too large.
        """
        async with self._lock:
            subject = self._table.subjects.turn(self._row, self._attempt, self._count)
            data = await asyncio.to_thread(self._table.encode, subject, SessionLog(list(turns), list(states)))
            while not await self._table.put_async(subject, data):
                # An actor that was taken for dead writes on: it has this attempt, and we take the next one.
                self._attempt += 1
                subject = self._table.subjects.turn(self._row, self._attempt, self._count)
                data = await asyncio.to_thread(self._table.encode, subject, SessionLog(list(turns), list(states)))
            self._count += 1


async def read_log(table: Table, row: RowId) -> tuple[list[SessionLog], int]:
    """Return the cells of a row in the order written, and the number of the next attempt at it.

    Malformed cells are skipped: their turns are lost, and the agent's next request begins a tree of its own.
    """
    places = []
    for subject in await table.list_subjects_async(table.subjects.turn(row, "*", "*")):
        with suppress(SubjectError):
            attempt, k = table.subjects.parse(subject).field.removeprefix(f"{TURNS}.").split(".")
            places.append((int(attempt), int(k)))
    places.sort()
    cells = await asyncio.gather(*(table.get_async(table.subjects.turn(row, *place)) for place in places))
    found = []
    for cell in cells:
        with suppress(CodecError, StoreError):
            if cell is not None:
                found.append(table.read(cell.data, SessionLog, resolve=table.store.reader()))
    return found, places[-1][0] + 1 if places else 0


def restore(sessions: Sequence[Session], logs: Sequence[SessionLog]) -> None:
    """Bring new sessions to where the logs end. Turns that do not fit their forest are left out."""
    for log in logs:
        for turn in log.turns:
            if turn.sample < len(sessions):
                with suppress(ValueError):
                    sessions[turn.sample].forest.add(turn_of(turn))
        for state in log.states:
            if state.sample >= len(sessions):
                continue
            session = sessions[state.sample]
            if state.reason:
                session.state = session.state or state
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


def cell_of(sample: int, turn: Turn) -> SessionTurn:
    """Return what a cell holds of a turn."""
    return SessionTurn(
        sample,
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

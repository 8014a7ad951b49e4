"""The part of the pump that runs in the role's thread: rows in, encoded cells or errors out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg

from broker.store import Store
from broker.subjects import RowId
from relax_actors.errors import ActorError, BrokerError, ConfigError, StoreError, StoreFullError
from relax_actors.messages import Dropped, DropReason
from relax_actors.runtime.role import Context, Drop, Role, Row

NOT_THE_ROWS = (ActorError, BrokerError, ConfigError, StoreFullError)
"""Errors that say nothing about the rows in hand."""


@dataclass(slots=True, eq=False)
class Job:
    """A row in hand: its message, its columns, and what became of it."""

    message: Msg
    row: RowId
    cells: dict[str, bytes]
    field: str = ""
    data: bytes | None = None
    error: Exception | None = None


class _InHand:
    """Jobs that a role was given: those that wait for a value, and those that have one of which nobody was told."""

    def __init__(self, store: Store, settle: Callable[[Job, Any], None], settled: Callable[[list[Job]], None]) -> None:
        self._store, self._settle, self._settled = store, settle, settled
        self.left: dict[Row, Job] = {}
        self.last: list[Job] = []

    def add(self, jobs: list[Job]) -> list[Row]:
        rows = {Row(job.row, job.cells, self._store): job for job in jobs}
        self.left |= rows
        return list(rows)

    def end(self, row: Row, value: Any) -> None:
        job = self.left.pop(row)
        try:
            self._settle(job, value)
        except Exception as error:  # noqa: BLE001 sorted out by who asked
            job.error = error
        self.last.append(job)

    def tell(self) -> None:
        if self.last:
            self._settled(self.last)
            self.last = []


class Handler:
    """Has a role handle jobs.

    Args:
        role: already set up.
        context: its surroundings.
    """

    def __init__(self, role: Role, context: Context) -> None:
        self._role, self._context, self._table = role, context, context.table

    def run(self, jobs: list[Job], more: Callable[[int], list[Job]], settled: Callable[[list[Job]], None]) -> list[Job]:
        """Handle jobs, and those that `more` gives meanwhile.

        `settled` is told of those that are through while others are in hand; the last ones are given back.
        """
        hand = _InHand(self._table.store, self._encode, settled)

        def joining(most: int) -> list[Row]:
            hand.tell()
            return hand.add(more(most))

        try:
            first = hand.add(jobs)
            with self._context.turn():
                for results in self._role.stream(first, joining):
                    for row, value in results:
                        hand.end(row, value)
                    if hand.left:
                        hand.tell()
            if hand.left:
                msg = f"{type(self._role).__name__} gave no value for {', '.join(str(row.id) for row in hand.left)}"
                raise ValueError(msg)  # noqa: TRY301 counted against the rows like any error of the role
        except BaseException as error:
            hand.tell()
            # One bad row must not take its neighbours along; an error without a row in hand is the actor's own.
            if not (hand.left and isinstance(error, Exception)):
                raise
            together = len(hand.left) == 1 or isinstance(error, NOT_THE_ROWS)
            for row in list(hand.left):
                hand.tell()
                hand.end(row, error if together else self._alone(row))
        return hand.last

    def _alone(self, row: Row) -> Any:
        try:
            with self._context.turn():
                found = [value for results in self._role.stream([row], _nothing) for _, value in results]
        except Exception as error:  # noqa: BLE001 sorted out by who asked
            return error
        return found[0] if found else ValueError(f"{type(self._role).__name__} gave no value for {row.id}")

    def _encode(self, job: Job, result: Any) -> None:
        if isinstance(result, StoreError) and not isinstance(result, StoreFullError):
            result = Drop(DropReason.LOST_SEGMENT, str(result))
        if isinstance(result, Exception):
            job.error = result
            return
        job.field = self._role.writes
        if isinstance(result, Drop):
            job.field, result = "dropped", Dropped(result.reason, result.detail)
        if job.field:
            job.data = self._table.encode(self._table.subject(job.row, job.field), result)


def _nothing(most: int) -> Sequence[Row]:
    del most
    return ()

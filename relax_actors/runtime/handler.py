"""Handling of rows in the role's thread: jobs in, encoded cells or errors out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from nats.aio.msg import Msg

from broker.encoder import CellEncoder
from broker.subjects import RowId
from broker.table import Table
from relax_actors.errors import ActorError, BrokerError, ConfigError, StoreError, StoreFullError
from relax_actors.messages import Dropped, DropReason
from relax_actors.runtime.context import Context
from relax_actors.runtime.result_check import ResultCheck
from relax_actors.runtime.role import Drop, Results, Role
from relax_actors.runtime.row import Row

BLAMELESS_ERRORS = (ActorError, BrokerError, ConfigError, StoreFullError)
"""Errors that no row has caused."""


@dataclass(slots=True, eq=False)
class Job:
    """Row being handled: message and columns, then the column to write or the error."""

    message: Msg
    row: RowId
    cells: dict[str, bytes]
    stored_at: int = 0
    """Stream sequence of the input that completed the row."""
    field: str = ""
    data: bytes | None = None
    error: Exception | None = None


Encode: TypeAlias = Callable[[Job, Row, Any], None]


class _OpenJobs:
    """Jobs given to a role: unfinished ones by row, and finished unreported ones."""

    def __init__(
        self, table: Table, encode: Callable[[Job, Row, Any, CellEncoder], None], report: Callable[[list[Job]], None]
    ) -> None:
        self._table, self._encode, self._report = table, encode, report
        self.unfinished: dict[Row, Job] = {}
        self.finished: list[Job] = []

    def add(self, jobs: list[Job]) -> list[Row]:
        rows = {Row(job.row, job.cells, self._table.store): job for job in jobs}
        self.unfinished |= rows
        return list(rows)

    def finish(self, results: Results) -> None:
        """Encode results that came together; their large arrays share a segment."""
        results = list(results)
        jobs = {row: self.unfinished[row] for row, _ in results}
        encoder = self._table.encoder()
        for row, value in results:
            try:
                self._encode(jobs[row], row, value, encoder)
            except Exception as error:  # noqa: BLE001 classified by the pump
                jobs[row].error = error
        try:
            encoder.close()
        except Exception as error:  # noqa: BLE001 classified by the pump
            for job in jobs.values():
                job.error = job.error or error
        self.finished += map(self.unfinished.pop, jobs)

    def flush(self) -> None:
        if self.finished:
            self._report(self.finished)
            self.finished = []


class Handler:
    """Handles jobs with a role, in the role's thread."""

    def __init__(self, role: Role, context: Context) -> None:
        self._role, self._context, self._table = role, context, context.table
        self._check = ResultCheck(role, context)

    def run(self, jobs: list[Job], more: Callable[[int], list[Job]], report: Callable[[list[Job]], None]) -> list[Job]:
        """Handle jobs, and those that the role takes meanwhile; return the unreported ones.

        `more` takes up to so many further jobs that have arrived; `report` is called with finished jobs while others
        are unfinished.
        """
        open_jobs = _OpenJobs(self._table, self._encode, report)

        def take_more(most: int) -> list[Row]:
            open_jobs.flush()
            return open_jobs.add(more(most))

        try:
            first = open_jobs.add(jobs)
            with self._context.device_lock():
                for results in self._role.stream(first, take_more):
                    if results:
                        open_jobs.finish(results)
                    if open_jobs.unfinished:
                        open_jobs.flush()
            if rows := open_jobs.unfinished:
                msg = f"{type(self._role).__name__} returned no value for {', '.join(str(row.id) for row in rows)}"
                raise ValueError(msg)  # noqa: TRY301 counted against the rows like any error of the role
        except BaseException as error:
            open_jobs.flush()
            # Without an unfinished row the error is the actor's own.
            if not (open_jobs.unfinished and isinstance(error, Exception)):
                raise
            # Retry each row alone, so that one bad row does not fail the others.
            same_error = len(open_jobs.unfinished) == 1 or isinstance(error, BLAMELESS_ERRORS)
            for row in list(open_jobs.unfinished):
                open_jobs.flush()
                open_jobs.finish([(row, error if same_error else self._handle_alone(row))])
        return open_jobs.finished

    def _handle_alone(self, row: Row) -> Any:
        try:
            with self._context.device_lock():
                values = [value for results in self._role.stream([row], _no_more) for _, value in results]
        except Exception as error:  # noqa: BLE001 classified by the pump
            return error
        return values[0] if values else ValueError(f"{type(self._role).__name__} returned no value for {row.id}")

    def _encode(self, job: Job, row: Row, result: Any, encoder: CellEncoder) -> None:
        if self._role.writes and not isinstance(result, Exception | Drop):
            try:
                self._check(row, result)
            except StoreError as error:  # of a column that the role reads, but did not need for its result
                result = error
        if isinstance(result, StoreError) and not isinstance(result, StoreFullError):
            result = Drop(DropReason.LOST_SEGMENT, str(result))
        if isinstance(result, Exception):
            job.error = result
            return
        job.field = self._role.writes
        if isinstance(result, Drop):
            job.field, result = "dropped", Dropped(result.reason, result.detail)
        if job.field:
            job.data = encoder.encode(self._table.subject(job.row, job.field), result)


def _no_more(most: int) -> Sequence[Row]:
    del most
    return ()

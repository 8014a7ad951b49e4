"""Fail fast: stop a run whose first rows all fail in a role with one error."""

from __future__ import annotations

import traceback

from broker.subjects import RowId
from relax_actors.errors import AllRowsFailedError
from relax_actors.runtime.context import Context
from relax_actors.runtime.stacks import innermost, place

MIN_ROWS, MAX_ROWS = 8, 16
FLUSH_SECONDS = 5.0


def first_rows(prompts_per_step: int) -> int:
    """Return how many rows must fail before a run is stopped: a step's rows, within `MIN_ROWS` and `MAX_ROWS`."""
    return max(MIN_ROWS, min(prompts_per_step, MAX_ROWS))


def signature(error: BaseException) -> tuple[str, ...]:
    """Return what two failures of one cause share: the exception's type, and the function that raised it.

    The message is left out, since it often holds the row's own data. Of a stack, the innermost frame outside libraries
    counts, so that an error inside a parser is an error of the function that called it.
    """
    kind = type(error)
    frame = innermost(traceback.extract_tb(error.__traceback__))
    at = () if frame is None else (frame.filename, frame.name)
    return (f"{kind.__module__}.{kind.__qualname__}", *at)


class FirstRows:
    """Decides whether the first rows of an actor have all failed with one error.

    A row counts once, however often it is retried. One row without an error, or with another error, ends the matter
    for the life of the actor: from then on failures are those of single rows.

    Args:
        limit: rows that must have failed.

    Attributes:
        rows: rows that have failed so far.
        decided: whether a row has succeeded or failed with another error.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._signature: tuple[str, ...] | None = None
        self.rows: set[RowId] = set()
        self.decided = False

    def succeeded(self) -> None:
        """Record that a row did not fail."""
        self.decided = True
        self.rows.clear()

    def failed(self, row: RowId, error: BaseException, *, final: bool) -> bool:
        """Record a failure; return whether the run should stop.

        Args:
            row: row that failed.
            error: its error.
            final: whether the row has been quarantined; a row that is retried may succeed yet.
        """
        if self.decided:
            return False
        found = signature(error)
        self._signature = self._signature or found
        if found != self._signature:
            self.succeeded()
            return False
        self.rows.add(row)
        return final and len(self.rows) >= self._limit


def all_rows_failed(context: Context, count: int, error: BaseException) -> AllRowsFailedError:
    """Make the error that stops the run, and publish it as event `all_rows_failed`.

    The first line of its text says what to do; the last traceback follows.
    """
    where = place(traceback.extract_tb(error.__traceback__))
    text = f"{type(error).__name__}: {error}".split("\n", 1)[0][:500]
    headline = (
        f"the first {count} rows of role {context.role} all failed with the same error, so the run was stopped: "
        f"{text}{f', in {where}' if where else ''}. Fix the cause and run the same `relax up` again: new rows take the "
        f"place of the quarantined ones; `relax quarantine requeue {context.config.run.name} --all` admits their tasks "
        "again"
    )
    trace = "".join(traceback.format_exception(error))
    context.journal.event("all_rows_failed", rows=count, error=headline, traceback=trace)
    return AllRowsFailedError(f"{headline}\n{trace}")

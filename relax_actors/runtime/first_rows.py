"""Fail fast: stop a run whose first rows all fail in a role with one error."""

from __future__ import annotations

import traceback
from collections import defaultdict
from dataclasses import dataclass, field

from broker.subjects import RowId
from relax_actors.errors import AllRowsFailedError
from relax_actors.runtime.context import Context
from relax_actors.runtime.stacks import innermost, place

MIN_ROWS, MAX_ROWS = 8, 16
FLUSH_SECONDS = 5.0
AGAIN = {
    "group": (
        "new rows take the place of the quarantined ones; `relax quarantine requeue {run} --all` admits their tasks "
        "again"
    ),
    "eval": "the evaluation of their version leaves the quarantined rows out",
}
"""What becomes of the quarantined rows of a kind when the run goes on."""


def first_rows(prompts_per_step: int) -> int:
    """Return how many rows must fail before a run stops: a step's, within bounds."""
    return max(MIN_ROWS, min(prompts_per_step, MAX_ROWS))


def signature(error: BaseException) -> tuple[str, ...]:
    """Return the common cause of failures: exception type, and the function that raised it.

    The message is left out, since it often holds the row's own data. Of a stack, the innermost frame outside libraries
    counts, so that an error inside a parser is an error of the function that called it.
    """
    kind = type(error)
    frame = innermost(traceback.extract_tb(error.__traceback__))
    at = () if frame is None else (frame.filename, frame.name)
    return (f"{kind.__module__}.{kind.__qualname__}", *at)


@dataclass(slots=True)
class _Kind:
    """First rows of one kind.

    Attributes:
        rows: rows that have failed so far.
        signature: that of their error; None before the first.
        decided: whether a row has succeeded or failed with another error.
    """

    rows: set[RowId] = field(default_factory=set)
    signature: tuple[str, ...] | None = None
    decided: bool = False


class FirstRows:
    """Decides whether the first rows of an actor have all failed with one error.

    Training rows and held-out rows are judged apart: a role may treat them by different functions, as `reward.function`
    and `eval.reward`. A row counts once, however often it is retried. One row without an error, or with another error,
    ends the matter for its kind and the life of the actor: from then on failures are those of single rows.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kinds: defaultdict[str, _Kind] = defaultdict(_Kind)

    def is_decided(self, kind: str) -> bool:
        """Whether a row of a kind has succeeded or failed with another error."""
        return self._kinds[kind].decided

    def succeeded(self, kind: str) -> None:
        """Record that a row of a kind did not fail."""
        first = self._kinds[kind]
        first.decided = True
        first.rows.clear()

    def failed(self, row: RowId, error: BaseException, *, final: bool) -> int:
        """Record a failure; return how many rows have failed if the run should stop, else 0.

        A failure is `final` if the row has been quarantined; a row that is retried may succeed yet.
        """
        first = self._kinds[row.kind]
        if first.decided:
            return 0
        failure = signature(error)
        first.signature = first.signature or failure
        if failure != first.signature:
            self.succeeded(row.kind)
            return 0
        first.rows.add(row)
        return len(first.rows) if final and len(first.rows) >= self._limit else 0


def all_rows_failed(context: Context, kind: str, count: int, error: BaseException) -> AllRowsFailedError:
    """Make the error that stops the run, and publish it as event `all_rows_failed`.

    The first line of its text says what to do; the last traceback follows.
    """
    where = place(traceback.extract_tb(error.__traceback__))
    text = f"{type(error).__name__}: {error}".split("\n", 1)[0][:500]
    headline = (
        f"the first {count} {'held-out ' if kind == 'eval' else ''}rows of role {context.role} all failed with the "
        f"same error, so the run was stopped: {text}{f', in {where}' if where else ''}. Fix the cause and run the same "
        f"`relax up` again: {AGAIN[kind].format(run=context.config.run.name)}"
    )
    trace = "".join(traceback.format_exception(error))
    context.journal.event("all_rows_failed", rows=count, error=headline, traceback=trace)
    return AllRowsFailedError(f"{headline}\n{trace}")

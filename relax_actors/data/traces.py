"""Recorded samples as data: a row is a prompt's traces, trained without a rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any

import xxhash

from relax_actors.data.fields import check_index
from relax_actors.data.source import SourceSettings
from relax_actors.data.task import Task
from relax_actors.data.trace_files import TraceFiles
from relax_actors.errors import ConfigError, RowError
from relax_actors.traces import Trace, TraceError

MARK = "trace"
"""Key of the metadata of a row: the numbers of its traces in the files, and their checksum."""


class Take(StrEnum):
    """Option `take` of a source of traces: what a row is."""

    ROW = "row"
    """All samples of a prompt."""
    EACH = "each"
    """One sample."""
    BEST = "best"
    """The sample of a prompt with the highest reward, the first of several."""


def open_traces(settings: SourceSettings) -> TraceRows:
    """Open `data.path` as traces; raises ConfigError if missing or unreadable."""
    if settings.fields:
        msg = "data.fields renames fields of rows, and traces have formats of their own; leave it out"
        raise ConfigError(msg)
    take = settings.options.get("take", Take.ROW)
    if settings.options.keys() - {"take"} or take not in set(Take):
        msg = f"data.options = {settings.options!r:.80}: traces take the option take, one of {', '.join(Take)}"
        raise ConfigError(msg)
    return TraceRows(TraceFiles(settings), settings.size, Take(take))


class TraceRows:
    """Rows of traces: neighbours of one row or one prompt are together.

    A trace whose row cannot be told, such as a line that is no JSON, belongs to the row before it, or at the begin to
    the first row: so a row that lacks one of its samples cannot be trained.

    Args:
        files: the traces. The heads of all are read once, when the rows are first asked for.
        size: most rows; None for all.
        take: what a row is.
    """

    def __init__(self, files: TraceFiles, size: int | None = None, take: Take = Take.ROW) -> None:
        self._files, self._size, self._take = files, size, take

    @cached_property
    def _rows(self) -> list[list[int]]:
        """Numbers of the traces of each row."""
        if self._take is Take.EACH:
            return [[number] for number in range(len(self._files))][: self._size]
        rows, rewards, before = list[list[int]](), list[float](), ""
        for number in range(len(self._files)):
            head = self._files.head(number)
            rewards.append(math.inf if head is None else head.reward)
            row = before if head is None else head.row
            if rows and before in ("", row):
                rows[-1].append(number)
            else:
                rows.append([number])
            before = row
        if self._take is Take.BEST:
            rows = [[max(row, key=lambda number: rewards[number])] for row in rows]
        return rows[: self._size]

    def __len__(self) -> int:
        return len(self._rows)

    def traces(self, i: int) -> list[Trace]:
        """Return the traces of a row; raises IndexError, or RowError if one is not exact."""
        check_index(i, len(self._rows))
        return self._traces(self._rows[i])

    def _traces(self, numbers: Sequence[int]) -> list[Trace]:
        return [self._files.trace(number) for number in numbers]

    def __getitem__(self, i: int) -> Task:
        check_index(i, len(self._rows))
        return self._task(self._rows[i])

    def marked(self, mark: object) -> Task:
        """Return the row of traces that a mark names, without reading the heads of others.

        Raises:
            RowError: there are no such traces, or they are not exact, or have changed.
        """
        if isinstance(mark, dict) and mark.get("item") in range(len(self._rows) if "item" in mark else 0):
            # A row that an earlier version admitted.
            mark = {"numbers": self._rows[mark["item"]], "xxh3": mark.get("xxh3")}
        numbers = mark.get("numbers") if isinstance(mark, dict) else None
        known = range(len(self._files))
        if not isinstance(numbers, list) or not numbers or any(type(n) is not int or n not in known for n in numbers):
            msg = f"the row names none of {len(known)} traces; requeue it, or restore data.path"
            raise RowError(msg)
        task = self._task(numbers)
        if task.metadata[MARK] != mark:
            msg = f"{task.origin}: its traces have changed since the row was admitted; restore the files of data.path"
            raise RowError(msg)
        return task

    def _task(self, numbers: Sequence[int]) -> Task:
        traces = self._traces(numbers)
        first = traces[0]
        for trace in traces:
            if trace.media:
                msg = (
                    f"{trace.origin}: it has media ({trace.media[0].name[:60]!r}), whose features a trace lacks; "
                    "it can be read and written, but not trained"
                )
                raise TraceError(msg)
            if "reward" in trace.token_values:
                msg = (
                    f"{trace.origin}: it has rewards of single tokens, which are not trained from traces; remove the "
                    "row, or train it by its own run"
                )
                raise TraceError(msg)
        mark = {"numbers": list(numbers), "xxh3": digest_of(traces)}
        prompt: Any = first.prompt_messages or first.prompt
        return Task(prompt, first.answer, first.metadata | {MARK: mark}, first.origin, traces=tuple(traces))


def digest_of(traces: Sequence[Trace]) -> str:
    """Return the checksum of the traces of a row."""
    return xxhash.xxh3_128_hexdigest("".join(trace.digest for trace in traces).encode())

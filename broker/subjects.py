"""Subjects of a run: all of them are built and parsed here.

relax.<run>.<kind>.<step>.<index>.<field>               a cell of a row, such as group.12.3.prompt
relax.<run>.<kind>.<step>.<index>.turns.<attempt>.<k>   turns of a row, while it is worked on
relax.<run>.<kind>.<number>                             a numbered cell, such as batch.12
relax.<run>.event.<role>.<n>.<kind>                     event of an actor or the supervision, JSON
relax.<run>.metric.<role>.<n>                           metrics of an actor, JSON
relax.<run>.request.<kind>.<n>                          requests to an actor, in no stream

The owner of a table declares the kinds of its rows and numbered cells (see `Kinds`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

from broker.errors import SubjectError

ROOT = "relax"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
TURNS = "turns"
RESERVED = ("event", "metric", "request")
"""First tokens of the subjects that name no cell."""
_N = "(?:0|[1-9][0-9]{0,17})"
_KIND = rf"((?!(?:{'|'.join(RESERVED)})\.){NAME.pattern})"
_ROW = re.compile(rf"{_KIND}\.({_N})\.({_N})")
_CELL = re.compile(rf"{_KIND}\.({_N})(?:\.({_N})\.({NAME.pattern}|{TURNS}\.{_N}\.{_N}))?")


def check_name(name: str, what: str) -> str:
    """Return a name of 1 to 64 letters, digits, `-` and `_`; raises SubjectError otherwise."""
    if not NAME.fullmatch(name):
        msg = f"{what} {name!r} cannot be part of a subject; use 1 to 64 letters, digits, '-' or '_'"
        raise SubjectError(msg)
    return name


def check_kind(kind: str) -> str:
    """Return a valid kind of rows or numbered cells; raises SubjectError, as for `RESERVED`."""
    if kind in RESERVED:
        msg = f"kind {kind!r} cannot name cells: {', '.join(RESERVED)} name other messages; choose another name"
        raise SubjectError(msg)
    return check_name(kind, "kind")


@dataclass(frozen=True, slots=True)
class Kinds:
    """Kinds of the rows and of the numbered cells of a table: its stream stores no others."""

    rows: tuple[str, ...] = ()
    numbered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class RowId:
    """Id of a row. Rows of one kind and step share a folder of the store."""

    step: int
    index: int
    kind: str = "group"

    def __str__(self) -> str:
        return f"{self.kind}.{self.step}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> RowId:
        """Parse the output of `str`; raises SubjectError if `text` does not name a row."""
        if not (match := _ROW.fullmatch(text)):
            msg = f"{text!r} does not name a row; a row is <kind>.<step>.<index>, such as group.12.3"
            raise SubjectError(msg)
        return cls(int(match[2]), int(match[3]), match[1])


@dataclass(frozen=True, slots=True)
class CellId:
    """Parsed subject of a cell: a field of a row, or a numbered cell such as `batch.7`.

    The number of a numbered cell is its `step`; its `index` is -1 and its `field` empty. The `field` of a turn cell is
    `turns.<attempt>.<k>`.
    """

    kind: str
    step: int
    index: int = -1
    field: str = ""

    @property
    def row(self) -> RowId:
        """Row of the cell, which must not be a numbered cell."""
        return RowId(self.step, self.index, self.kind)


@dataclass(frozen=True, slots=True)
class Subjects:
    """Builds the subjects of one run."""

    run: str

    def __post_init__(self) -> None:
        check_name(self.run, "run name")

    @property
    def prefix(self) -> str:
        """Common prefix of the run's subjects, without a trailing dot."""
        return f"{ROOT}.{self.run}"

    @property
    def table_stream(self) -> str:
        """Name of the stream that holds the cells."""
        return f"RELAX_{self.run}_TABLE"

    @property
    def log_stream(self) -> str:
        """Name of the stream that holds events and metrics."""
        return f"RELAX_{self.run}_LOG"

    @property
    def state_bucket(self) -> str:
        """Name of the KV bucket for leases, incarnations and failure counts."""
        return f"RELAX_{self.run}_STATE"

    def cell(self, row: RowId, field: str) -> str:
        """Subject of one cell of a row."""
        return f"{self.prefix}.{row}.{check_name(field, 'field')}"

    def column(self, field: str, kind: str = "group", step: int | str = "*") -> str:
        """Filter for one column of all rows of a kind, or of those of one step."""
        return f"{self.prefix}.{kind}.{step}.*.{check_name(field, 'field')}"

    def row(self, row: RowId) -> str:
        """Filter for all cells of a row."""
        return f"{self.prefix}.{row}.>"

    def turn(self, row: RowId, attempt: int | str, k: int | str) -> str:
        """Subject of a turn cell of a row; `*` matches all attempts or cells."""
        return f"{self.prefix}.{row}.{TURNS}.{attempt}.{k}"

    def turns(self, kind: str) -> str:
        """Filter for the turn cells of all rows of a kind."""
        return f"{self.prefix}.{kind}.*.*.{TURNS}.*.*"

    def numbered(self, kind: str, number: int | str) -> str:
        """Subject of a numbered cell; `*` matches all numbers. Raises as `check_kind`."""
        return f"{self.prefix}.{check_kind(kind)}.{number}"

    def event(self, role: str, n: int | str, kind: str) -> str:
        """Subject of an event."""
        return f"{self.prefix}.event.{role}.{n}.{kind}"

    def metric(self, role: str, n: int | str) -> str:
        """Subject of an actor's metrics."""
        return f"{self.prefix}.metric.{role}.{n}"

    def service(self, kind: str, n: int | str) -> str:
        """Subject of requests to actor `n` of the role that serves them; `*` for any actor."""
        return f"{self.prefix}.request.{check_name(kind, 'kind of requests')}.{n}"

    def table_subjects(self, kinds: Kinds) -> list[str]:
        """Subjects of the table stream; raises SubjectError for a bad kind, see `check_kind`."""
        rows = [(f"{self.prefix}.{check_kind(kind)}.*.*.*", self.turns(kind)) for kind in kinds.rows]
        return [*chain.from_iterable(rows), *(self.numbered(kind, "*") for kind in kinds.numbered)]

    def log_subjects(self) -> list[str]:
        """Subjects of the log stream."""
        return [f"{self.prefix}.event.>", f"{self.prefix}.metric.>"]

    def parse(self, subject: str) -> CellId:
        """Parse the subject of a cell; raises SubjectError if it names no cell of this run."""
        head = f"{self.prefix}."
        if subject.startswith(head) and (match := _CELL.fullmatch(subject, len(head))):
            kind, step, index, field = match.groups()
            return CellId(kind, int(step)) if field is None else CellId(kind, int(step), int(index), field)
        msg = f"subject {subject[:200]!r} does not name a cell of run {self.run!r}"
        raise SubjectError(msg)

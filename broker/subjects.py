"""Subjects of a run: all of them are built and parsed here.

relax.<run>.group.<step>.<index>.<field>     a cell of a training row
relax.<run>.eval.<version>.<index>.<field>   a cell of an evaluation row
relax.<run>.<kind>.<step>.<index>.turns.<attempt>.<k>   turns of a row's samples, while they are generated
relax.<run>.batch.<step>                     rows that a step trains
relax.<run>.weights.<version>                location and fingerprint of a weight version
relax.<run>.checkpoint.<version>             a durable checkpoint
relax.<run>.evaluation.<version>             result of the evaluation of a version
relax.<run>.critic.<version>                 fingerprint of a version of the critic
relax.<run>.critic_checkpoint.<version>      a durable checkpoint of the critic
relax.<run>.event.<role>.<n>.<kind>          event of an actor or the supervision, JSON
relax.<run>.metric.<role>.<n>                metrics of an actor, JSON
relax.<run>.env.<n>                          requests to an actor that hosts environments; in no stream
relax.<run>.generate.<n>                     requests to an actor that generates; in no stream
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from broker.errors import SubjectError

ROOT = "relax"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")

ROW_KINDS = ("group", "eval")
TURNS = "turns"
NUMBERED_KINDS = ("batch", "weights", "checkpoint", "evaluation", "critic", "critic_checkpoint")
SERVICES = ("env", "generate")
"""Kinds of requests between actors, which no stream stores."""


def check_name(name: str, what: str) -> str:
    """Return `name` if it can be a token of a subject.

    Args:
        name: the name to check.
        what: kind of name, for the error.

    Raises:
        SubjectError: the name is not 1 to 64 letters, digits, `-` or `_`.
    """
    if not NAME.fullmatch(name):
        msg = f"{what} {name!r} cannot be part of a subject; use 1 to 64 letters, digits, '-' or '_'"
        raise SubjectError(msg)
    return name


@dataclass(frozen=True, slots=True, order=True)
class RowId:
    """Id of a row: (step, index) for training; (version, index) for kind `eval`."""

    step: int
    index: int
    kind: str = "group"

    def __str__(self) -> str:
        return f"{self.kind}.{self.step}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> RowId:
        """Parse the output of `str`.

        Raises:
            SubjectError: `text` does not name a row.
        """
        kind, _, rest = text.partition(".")
        step, _, index = rest.partition(".")
        if kind not in ROW_KINDS or not _NUMBER.fullmatch(step) or not _NUMBER.fullmatch(index):
            msg = f"{text!r} does not name a row; a row is group.<step>.<index> or eval.<version>.<index>"
            raise SubjectError(msg)
        return cls(int(step), int(index), kind)


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
        """Row of the cell; only for kinds `group` and `eval`."""
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
        """Subject of a numbered cell (see `NUMBERED_KINDS`); `*` matches all numbers.

        Raises:
            SubjectError: `kind` is not one of `NUMBERED_KINDS`.
        """
        if kind not in NUMBERED_KINDS:
            msg = f"no numbered kind {kind!r}; there are {', '.join(NUMBERED_KINDS)}"
            raise SubjectError(msg)
        return f"{self.prefix}.{kind}.{number}"

    def event(self, role: str, n: int | str, kind: str) -> str:
        """Subject of an event."""
        return f"{self.prefix}.event.{role}.{n}.{kind}"

    def metric(self, role: str, n: int | str) -> str:
        """Subject of an actor's metrics."""
        return f"{self.prefix}.metric.{role}.{n}"

    def service(self, kind: str, n: int | str) -> str:
        """Subject of requests to actor `n` of the role that serves a kind of them (see `SERVICES`); `*` for any actor.

        Raises:
            SubjectError: `kind` is not one of `SERVICES`.
        """
        if kind not in SERVICES:
            msg = f"no service {kind!r}; there are {', '.join(SERVICES)}"
            raise SubjectError(msg)
        return f"{self.prefix}.{kind}.{n}"

    def table_subjects(self) -> list[str]:
        """Subjects of the table stream."""
        rows = [name for kind in ROW_KINDS for name in (f"{self.prefix}.{kind}.*.*.*", self.turns(kind))]
        return rows + [f"{self.prefix}.{kind}.*" for kind in NUMBERED_KINDS]

    def log_subjects(self) -> list[str]:
        """Subjects of the log stream."""
        return [f"{self.prefix}.event.>", f"{self.prefix}.metric.>"]

    def parse(self, subject: str) -> CellId:
        """Parse the subject of a cell.

        Raises:
            SubjectError: the subject does not name a cell of this run.
        """
        head = f"{self.prefix}."
        parts = subject[len(head) :].split(".") if subject.startswith(head) else []
        if len(parts) == 4 and parts[0] in ROW_KINDS:  # noqa: PLR2004
            kind, step, index, field = parts
            if _NUMBER.fullmatch(step) and _NUMBER.fullmatch(index) and NAME.fullmatch(field):
                return CellId(kind, int(step), int(index), field)
        is_turn = len(parts) == 6 and parts[0] in ROW_KINDS and parts[3] == TURNS  # noqa: PLR2004
        if is_turn and all(_NUMBER.fullmatch(part) for part in (*parts[1:3], *parts[4:])):
            return CellId(parts[0], int(parts[1]), int(parts[2]), ".".join(parts[3:]))
        if len(parts) == 2 and parts[0] in NUMBERED_KINDS and _NUMBER.fullmatch(parts[1]):  # noqa: PLR2004
            return CellId(parts[0], int(parts[1]))
        msg = f"subject {subject[:200]!r} does not name a cell of run {self.run!r}"
        raise SubjectError(msg)

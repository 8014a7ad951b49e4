"""Row of the run's table, as a role reads it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from broker.codec import decode_fields, open_envelope, plain_value
from broker.store import Store
from broker.subjects import RowId
from relax_actors import messages
from relax_actors.errors import SubjectError

ROW_KINDS = ("group", "eval")
"""Kinds of rows: `group.<step>.<index>` for training, `eval.<version>.<index>` for held-out data."""
COLUMNS: dict[str, type] = {
    "prompt": messages.Prompt,
    "media": messages.PreparedPrompt,
    "trajectory": messages.Trajectory,
    "reward": messages.Reward,
    "teacher": messages.TeacherScores,
    "advantage": messages.Advantage,
    "dropped": messages.Dropped,
    "quarantined": messages.Quarantined,
    "requeued": messages.Requeued,
    "readmitted": messages.Readmitted,
}
"""Columns of the built-in roles, and the dataclass that each is decoded into."""

FAILURES = ("dropped", "quarantined")
"""Columns by which a row leaves the run untrained; `finish.ends_row` says which of their cells do."""
END_COLUMNS = (*FAILURES, "requeued", "readmitted")
"""Columns that record the end of a row. Only the engine writes them; a user's role must not."""
REDELIVERY = "redeliver-"
"""Begin of the columns whose cells have a row delivered to a role again; see `supervision/lost_rows.py`."""


def parse_row(text: str) -> RowId:
    """Parse the name of a row of a run; raises SubjectError if `text` does not name a row."""
    with suppress(SubjectError):
        if (row := RowId.parse(text)).kind in ROW_KINDS:
            return row
    msg = f"{text!r} does not name a row; a row is group.<step>.<index> or eval.<version>.<index>"
    raise SubjectError(msg)


def redelivery_column(role: str) -> str:
    """Name the column whose cell has its row delivered to a role again."""
    return f"{REDELIVERY}{role}"


class Row:
    """Columns of one row that a role reads: `row.trajectory`, `row.reward`, ...

    A column of a built-in role is a dataclass of `relax_actors.messages`. A column of another role is what its `handle`
    returned: plain data, arrays, or a `Reward`. Each column is decoded on first use and then cached.

    Attributes:
        id: step and index of the row.
    """

    __slots__ = ("_cells", "_store", "_values", "id")

    def __init__(self, row: RowId, cells: dict[str, bytes], store: Store) -> None:
        self.id = row
        self._cells = cells
        self._store = store
        self._values: dict[str, Any] = {}

    @classmethod
    def of(cls, **columns: Any) -> Row:
        """Build a row from values of columns, to call a role without a run."""
        row = cls(RowId(0, 0), dict.fromkeys(columns, b""), Store(Path()))
        row._values.update(columns)
        return row

    @property
    def is_eval(self) -> bool:
        """Whether this is a held-out row."""
        return self.id.kind == "eval"

    def column(self, name: str) -> Any:
        """Return a column by name.

        Raises:
            KeyError: the role does not read this column.
            CodecError: the cell is malformed.
            StoreError: an array of the cell is missing from the store or corrupt.
        """
        if name not in self._values:
            data = self._cells[name]
            envelope = open_envelope(data, self._store.reader())
            expected = COLUMNS.get(name) or (messages.Reward if envelope.type == "Reward" else None)
            self._values[name] = decode_fields(envelope, expected) if expected else plain_value(envelope)
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        """Whether the role reads a column of this name."""
        return name in self._cells

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._cells:
            msg = f"row {self.id} has no column {name!r} here; the role reads {sorted(self._cells)}: add it to `reads`"
            raise AttributeError(msg)
        return self.column(name)

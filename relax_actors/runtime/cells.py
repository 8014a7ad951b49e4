"""The table's cells for stateful roles: columns to read, and numbered cells.

A numbered cell (`batch`, `weights`, `checkpoint`, ...) has one owner and a checksum of its subject and
content.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from broker.codec import Array, plain_value
from broker.subjects import CellId, RowId
from relax_actors.errors import BrokerError, CodecError, RelaxError, StoreError
from relax_actors.messages import Batch, Checkpoint, Trajectory
from relax_actors.runtime.context import Context

if TYPE_CHECKING:
    from broker.table import Cell, Table

T = TypeVar("T")
ATTEMPTS = 100
REMOVAL_SECONDS = 0.5
"""Pause of a role that waits until the trainer has removed a cell."""
MAX_END_BYTES = 64 << 10
"""Largest cell that ends a row; a larger one is malformed, and would only fill the table."""


class Observer(Protocol):
    """Observer of cells, as the ledger is."""

    def observe(self, cell_id: CellId, value: Any = None) -> bool:
        """Record a cell; return False if it is a stray."""


def read_numbered(context: Context, cell: Cell, expected: type[T]) -> T | None:
    """Decode a numbered cell; publish an event and return None if it is malformed."""
    try:
        return context.table.read(cell.data, expected, subject=cell.subject)
    except CodecError as error:
        context.journal.event("malformed_cell", subject=cell.subject, error=str(error))
        return None


def observe(ledger: Observer, context: Context, cell_id: CellId, cell: Cell, expected: type | None) -> Any:
    """Pass a cell to a ledger; return a numbered cell's value, None if malformed.

    Args:
        ledger: the ledger.
        context: context of the role.
        cell_id: parsed subject of the cell.
        cell: the cell.
        expected: dataclass of a numbered cell; None for a cell of a row.
    """
    if is_oversized(cell_id, cell):
        context.journal.event("malformed_cell", subject=cell.subject, error=f"{len(cell.data)} bytes end a row")
        return None
    if expected is None:
        if not ledger.observe(cell_id) and context.role == "prompts":
            context.journal.event("stray_cell", subject=cell.subject, error="the ledger expects no row with this id")
        return None
    value = read_numbered(context, cell, expected)
    if value is not None:
        ledger.observe(cell_id, value if isinstance(value, Batch | Checkpoint) else None)
    return value


def is_oversized(cell_id: CellId, cell: Cell) -> bool:
    """Whether a cell that ends a row is too large to count; the trainer removes it."""
    return cell_id.field in ("dropped", "quarantined") and len(cell.data) > MAX_END_BYTES


def remove_or_wait(context: Context, cell: Cell) -> None:
    """Remove a cell that blocks another; roles other than the trainer wait for it."""
    if context.role == "trainer":
        context.table.remove([cell])
    else:
        time.sleep(REMOVAL_SECONDS)
        context.progress()


def fetch_own(context: Context, subject: str, expected: type[T]) -> T | None:
    """Fetch a numbered cell of the role; the trainer removes a malformed one."""
    table = context.table
    cell = table.get(subject, direct=False)
    if cell is None:
        return None
    try:
        return table.read(cell.data, expected, subject=subject)
    except CodecError as error:
        removed: dict[str, Any] = {"removed": True} if context.role == "trainer" else {}
        context.journal.event("malformed_cell", subject=subject, error=str(error), **removed)
        remove_or_wait(context, cell)
        return None


def put_own(context: Context, subject: str, value: T) -> T | None:
    """Write a numbered cell of the role; return None, or the value that is already there.

    Raises:
        BrokerError: malformed cells keep taking its place.
    """
    for _ in range(ATTEMPTS):
        if context.table.put(subject, value):
            return None
        known = fetch_own(context, subject, type(value))
        if known is not None:
            return known
    msg = f"malformed cells took {subject} {ATTEMPTS} times; find their writer, e.g. with `relax tail`"
    raise BrokerError(msg)


def read_column(table: Table, rows: Sequence[RowId], name: str, expected: type[T]) -> list[T | RelaxError]:
    """Read a column of rows; `StoreError` or `CodecError` in place of lost or malformed ones."""
    resolve = table.store.reader()
    return _read(table, rows, name, lambda _, data: table.read(data, expected, resolve=resolve))


def read_logprobs(
    table: Table, rows: Sequence[RowId], name: str, trajectories: Sequence[Trajectory | RelaxError]
) -> list[Array | RelaxError]:
    """Read log-probs or values, `[total] float32`, in the layout of the trajectory."""

    def read(n: int, data: bytes) -> Array:
        trajectory = trajectories[n]
        if isinstance(trajectory, RelaxError):
            raise trajectory
        try:
            array = np.asarray(plain_value(table.read_envelope(data)), np.float32)
        except (CodecError, TypeError, ValueError) as error:
            msg = f"column {name}: {error}"
            raise CodecError(msg) from error
        if array.shape != trajectory.logprobs.shape or not np.isfinite(array).all():
            wanted = f"expected {len(trajectory.logprobs)} finite numbers"
            msg = f"column {name} has shape {list(array.shape)} or is not finite; {wanted}"
            raise CodecError(msg)
        return array

    return _read(table, rows, name, read)


def _read(table: Table, rows: Sequence[RowId], name: str, read: Callable[[int, bytes], T]) -> list[T | RelaxError]:
    values: list[T | RelaxError] = []
    for n, cell in enumerate(table.get_all(table.subject(row, name) for row in rows)):
        try:
            if cell is None:
                msg = f"cell {rows[n]}.{name} does not exist"
                raise StoreError(msg)  # noqa: TRY301 handled like a lost array
            values.append(read(n, cell.data))
        except (StoreError, CodecError) as error:
            values.append(error)
    return values

"""How roles that own state read the table's cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from broker.codec import Array, plain_value
from broker.errors import StoreError
from broker.subjects import CellId, RowId
from broker.table import Cell, Table
from relax_actors.actor import Context
from relax_actors.errors import CodecError
from relax_actors.ledger import Ledger
from relax_actors.messages import Batch, Checkpoint, Trajectory


def observe(ledger: Ledger, context: Context, cell_id: CellId, cell: Cell) -> None:
    """Let a ledger take a cell in; a malformed one is named in an event and left out."""
    kinds: dict[str, type[Batch | Checkpoint]] = {"batch": Batch, "checkpoint": Checkpoint}
    expected = kinds.get(cell_id.kind)
    try:
        value = context.table.read(cell.data, expected) if expected else None
    except CodecError as error:
        context.journal.event("malformed_cell", subject=cell.subject, error=str(error))
        return
    ledger.observe(cell_id, value)


def read_logprobs(
    table: Table, column: str, step: int, indices: Sequence[int], trajectories: Sequence[Trajectory]
) -> tuple[list[Array], list[tuple[int, str]]]:
    """A column of log-probs of some rows, each `[total] float32` as its trajectory's own.

    Gives the arrays, and of the rows that have none that can be used the index and why.
    """
    found: list[Array] = []
    bad: list[tuple[int, str]] = []
    cells = table.get_all(table.cell(RowId(step, i), column) for i in indices)
    for index, cell, trajectory in zip(indices, cells, trajectories, strict=True):
        try:
            array = np.asarray(None if cell is None else plain_value(table.open(cell.data)), np.float32)
        except (StoreError, CodecError, TypeError, ValueError) as error:
            bad.append((index, f"column {column}: {error}"))
            continue
        if array.shape != trajectory.logprobs.shape or not np.isfinite(array).all():
            wanted = f"{len(trajectory.logprobs)} finite numbers"
            bad.append((index, f"column {column} has shape {list(array.shape)}, or does not hold {wanted}"))
        found.append(array)
    return found, bad

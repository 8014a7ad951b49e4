"""How roles that own state read the table's cells, and write those that they alone may write."""

from __future__ import annotations

from typing import TypeVar

from broker.subjects import CellId
from broker.table import Cell
from relax_actors.actor import Context
from relax_actors.errors import BrokerError, CodecError
from relax_actors.ledger import Ledger
from relax_actors.messages import Batch, Checkpoint, Weights

Numbered = Batch | Checkpoint | Weights
N = TypeVar("N", Batch, Checkpoint, Weights)
KINDS: dict[str, type[Batch | Checkpoint | Weights]] = {
    "batch": Batch,
    "checkpoint": Checkpoint,
    "weights": Weights,
}
ATTEMPTS = 100


def read_numbered(context: Context, cell_id: CellId, cell: Cell) -> Numbered | None:
    """The value of a numbered cell; None if it is malformed, which is told in an event."""
    try:
        return context.table.read(cell.data, KINDS[cell_id.kind], subject=cell.subject)
    except CodecError as error:
        context.journal.event("malformed_cell", subject=cell.subject, error=str(error))
        return None


def observe(ledger: Ledger, context: Context, cell_id: CellId, cell: Cell) -> Numbered | None:
    """Let a ledger take a cell in; gives the value of a numbered one, None if it is malformed and left out."""
    if cell_id.kind not in KINDS:
        if not ledger.observe(cell_id) and context.role == "prompts":
            context.journal.event("stray_cell", subject=cell.subject, error="no row of this id is wanted now")
        return None
    value = read_numbered(context, cell_id, cell)
    if value is not None:
        ledger.observe(cell_id, None if isinstance(value, Weights) else value)
    return value


def fetch_own(context: Context, subject: str, expected: type[N]) -> N | None:
    """Look up a numbered cell that the role owns; one that is malformed is named in an event and removed."""
    table = context.table
    cell = table.get(subject, direct=False)
    if cell is None:
        return None
    try:
        return table.read(cell.data, expected, subject=subject)
    except CodecError as error:
        context.journal.event("malformed_cell", subject=subject, error=str(error), removed=True)
        table.remove([cell])
        return None


def put_own(context: Context, subject: str, value: N) -> N | None:
    """Write a numbered cell that the role owns; None if ours lies there now, else what was there.

    Raises:
        BrokerError: malformed cells take its place again and again.
    """
    for _ in range(ATTEMPTS):
        if context.table.put(subject, value):
            return None
        known = fetch_own(context, subject, type(value))
        if known is not None:
            return known
    msg = f"{subject} was taken by malformed cells {ATTEMPTS} times; find out who writes them, e.g. by `relax tail`"
    raise BrokerError(msg)

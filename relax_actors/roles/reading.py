"""How roles that own state read the table's cells."""

from __future__ import annotations

from broker.subjects import CellId
from broker.table import Cell
from relax_actors.actor import Context
from relax_actors.errors import CodecError
from relax_actors.ledger import Ledger
from relax_actors.messages import Batch, Checkpoint


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

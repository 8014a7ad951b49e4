"""Collection of the rows that a checkpoint of the trainer covers."""

from __future__ import annotations

from collections.abc import Callable

from broker.subjects import CellId
from relax_actors.messages import Checkpoint, RowCounts
from relax_actors.training.ledger import Ledger
from relax_actors.weights.publisher_actor import Publications


class TrainedRows:
    """Rows of the steps below the floor; implements `Coverage` for the trainer.

    Args:
        publisher: publishes a version before its checkpoint is written.
        ledger: gives the floor, below which rows are covered.
        sweep: removes the rows that the table no longer needs.
    """

    def __init__(self, publisher: Publications, ledger: Ledger, sweep: Callable[[], object]) -> None:
        self._publisher, self._ledger, self._sweep = publisher, ledger, sweep

    def before_save(self) -> None:
        """Wait until the weights of the version are published."""
        self._publisher.flush()

    def floor(self, version: int) -> tuple[int, RowCounts]:
        """Return the floor of a checkpoint of `version`, and the counts of the rows of the steps below it."""
        floor = self._ledger.next_floor(version)
        return floor, self._ledger.totals_below(floor)

    def after_publish(self, cell: Checkpoint) -> None:
        """Record the floor of a checkpoint, and remove the rows below it."""
        self._ledger.observe(CellId("checkpoint", cell.version), cell)
        self._sweep()

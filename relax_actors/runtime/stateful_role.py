"""Base class of roles that own state: PromptSource, Trainer, Evaluator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.subjects import CellId
from relax_actors.config import Config
from relax_actors.runtime.role import Role

if TYPE_CHECKING:
    from broker.table import Cell


class StatefulRole(Role):
    """Role that rebuilds its state from the table and then follows its columns in stream order.

    Invariant: one incarnation acts at a time. A later incarnation fences the earlier one by its number.

    `recover`, `on_cells` and `idle` run in the role's thread, one call at a time. An exception ends the process, and
    the supervisor restarts it.
    """

    @classmethod
    def follows(cls, config: Config) -> list[str]:
        """Return the subjects to follow, from the beginning of the stream.

        Called before any actor exists, by the process that creates the run's consumers.
        """
        raise NotImplementedError

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Rebuild the state from all existing cells, in stream order; called once."""
        raise NotImplementedError

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Process new cells, in stream order. Called after `recover`, whenever cells arrive."""
        raise NotImplementedError

    def idle(self) -> None:
        """Do background work. Called about twice a second while no cells arrive."""

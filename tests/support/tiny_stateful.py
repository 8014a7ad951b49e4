"""A user's role that owns state, for tests of its credentials."""

from __future__ import annotations

from dataclasses import dataclass

from broker.subjects import CellId, Subjects
from broker.table import Cell
from relax_actors import RoleSpec, StatefulRole
from relax_actors.config import Config
from relax_actors.errors import ConfigError


@dataclass(frozen=True)
class Audit:
    """What the auditor saw of a step.

    Attributes:
        step: the step.
    """

    step: int


class Auditor(StatefulRole):
    """Write column `audited` beside each reward, and one numbered cell `audit.<step>` for each step it saw."""

    spec = RoleSpec(reads=("reward",), writes=("audited",), numbered={"audit": Audit})

    column: str = "audited"

    @classmethod
    def follows(cls, config: Config) -> list[str]:
        """Return the columns to read: the rewards, and what an earlier incarnation has audited."""
        subjects = Subjects(config.run.name)
        return [subjects.column(name) for name in ("reward", "audited")]

    def recover(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Audit the rows that no earlier incarnation has audited."""
        known = {cell_id.row for cell_id, _ in cells if cell_id.field == "audited"}
        self.on_cells([(cell_id, cell) for cell_id, cell in cells if cell_id.row not in known])

    def on_cells(self, cells: list[tuple[CellId, Cell]]) -> None:
        """Audit new rows."""
        table = self.context.table
        for cell_id, _ in cells:
            if cell_id.field == "reward":
                table.put(table.subject(cell_id.row, self.column), {"by": self.context.author})
                table.put(table.subjects.numbered("audit", cell_id.step), Audit(cell_id.step))


class Unready(Auditor):
    """Refuse to say what it reads, as a role does whose settings contradict the run's."""

    @classmethod
    def follows(cls, config: Config) -> list[str]:
        """Raise ConfigError, or the error of a bug where the run's name says so."""
        if config.run.name == "bug":
            return [str(1 // 0)]
        msg = f"roles.unready does not fit run {config.run.name}; remove it"
        raise ConfigError(msg)

"""Runtime of an actor: `Role`, its rows, and the pump between broker and role.

Names are imported on first use: commands that need only a run's folder must not import NATS and NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.lazy import lazy

if TYPE_CHECKING:
    from relax_actors.runtime.context import Context
    from relax_actors.runtime.role import Drop, More, Results, Role
    from relax_actors.runtime.role_check import check_role
    from relax_actors.runtime.row import COLUMNS, END_COLUMNS, Row
    from relax_actors.runtime.stateful_role import StatefulRole
else:
    __getattr__ = lazy(__name__)

__all__ = [
    "COLUMNS",
    "END_COLUMNS",
    "Context",
    "Drop",
    "More",
    "Results",
    "Role",
    "Row",
    "StatefulRole",
    "check_role",
]

"""Runtime of one actor: the `Role` base class, its rows, and the pump between broker and role."""

from __future__ import annotations

from relax_actors.runtime.context import Context
from relax_actors.runtime.role import Drop, More, Results, Role
from relax_actors.runtime.role_check import check_role
from relax_actors.runtime.row import COLUMNS, END_COLUMNS, Row
from relax_actors.runtime.stateful_role import StatefulRole

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

"""Runtime of one actor: the `Role` base class, its rows, and the pump between broker and role.

Names are imported on first use (PEP 562): commands that need only a run's folder must not import NATS and NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "COLUMNS": "row",
    "Context": "context",
    "Drop": "role",
    "END_COLUMNS": "row",
    "More": "role",
    "Results": "role",
    "Role": "role",
    "Row": "row",
    "StatefulRole": "stateful_role",
    "check_role": "role_check",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

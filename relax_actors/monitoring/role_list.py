"""Roles of a run as people see them: columns, actors, and the code that the actors run."""

from __future__ import annotations

from typing import Any

from relax_actors.monitoring.connection import Connected
from relax_actors.monitoring.leases import code_of
from relax_actors.operations.plan import nodes_of
from relax_actors.registry.catalog import ROLES
from relax_actors.roles import role_names, spec_of

HIDDEN = ("dropped", "quarantined", "requeued", "readmitted")
"""Columns that say how a row ended, which many roles write."""


def roles_of(at: Connected) -> list[dict[str, Any]]:
    """Return a run's roles in start order, as JSON; imports users' classes.

    Attributes of an entry: `role`, `reads` and `writes` (columns), `is_single`, `is_built_in`, and `actors`, each with
    `actor`, `node`, `phase`, `handled` (rows since its start) and `code` (version of the user's code; empty without).
    """
    leases = at.table.connection.call(at.state.leases(), 10) if at.live else {}
    nodes = nodes_of(leases)
    roles = []
    for name in role_names(at.config):
        spec = spec_of(at.config, name)
        actors = [
            _actor(child, number, node.children[child], leases.get(child) or {})
            for number, node in sorted(nodes.items())
            for child in node.children
            if child.rpartition(".")[0] == name
        ]
        roles.append(
            {
                "role": name,
                "reads": list(spec.reads),
                "writes": [column for column in spec.writes if column not in HIDDEN],
                "is_single": spec.single,
                "is_built_in": name in ROLES.built_in,
                "actors": actors,
            }
        )
    return roles


def _actor(name: str, node: int, state: Any, lease: dict[str, Any]) -> dict[str, Any]:
    handled = lease.get("handled")
    return {
        "actor": name,
        "node": node,
        "phase": str(state.get("phase", ""))[:40],
        "handled": handled if isinstance(handled, int) else 0,
        "code": code_of(lease),
    }


def lines_of(roles: list[dict[str, Any]]) -> list[str]:
    """Return a line for each role."""
    lines = []
    for role in roles:
        versions = ", ".join(sorted({actor["code"] for actor in role["actors"]} - {""}))
        count = len(role["actors"])
        actors = f"{count} actor{'' if count == 1 else 's'}" + (f", code {versions}" if versions else "")
        columns = f"{', '.join(role['reads']) or '-'} -> {', '.join(role['writes']) or '-'}"
        lines.append(f"{role['role']:<14} {actors:<32} {columns}")
    return lines

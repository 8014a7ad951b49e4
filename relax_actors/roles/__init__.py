"""Roles of the training loop, one file each, and look-ups of a run's roles by name."""

from relax_actors.roles.registry import (
    built_in_spec,
    make_role,
    numbered_cells,
    own_single_roles,
    replicas,
    role_class,
    role_names,
    roles_at_start,
    section_of,
    spec_of,
    table_kinds,
    unscalable_roles,
)
from relax_actors.runtime.row import FAILURES

__all__ = [
    "FAILURES",
    "built_in_spec",
    "make_role",
    "numbered_cells",
    "own_single_roles",
    "replicas",
    "role_class",
    "role_names",
    "roles_at_start",
    "section_of",
    "spec_of",
    "table_kinds",
    "unscalable_roles",
]

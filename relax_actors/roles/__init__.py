"""Roles of the training loop, one file each, and functions that look up a run's roles by name."""

from relax_actors.roles.registry import (
    FAILURES,
    built_in_spec,
    make_role,
    own_single_roles,
    replicas,
    role_class,
    role_names,
    section_of,
    spec_of,
)

__all__ = [
    "FAILURES",
    "built_in_spec",
    "make_role",
    "own_single_roles",
    "replicas",
    "role_class",
    "role_names",
    "section_of",
    "spec_of",
]

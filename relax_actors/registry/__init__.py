"""Resolve the names in a configuration: registries, entry points of installed packages, dotted paths."""

from relax_actors.registry.registry import Registry
from relax_actors.registry.role_spec import RoleSpec

__all__ = ["Registry", "RoleSpec"]

"""Names in a configuration: registries, entry points, and dotted paths."""

from relax_actors.registry.registry import Registry
from relax_actors.registry.role_spec import RoleSpec

__all__ = ["Registry", "RoleSpec"]

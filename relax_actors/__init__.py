"""Reinforcement-learning post-training as an actor system on NATS JetStream."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from relax_actors.torchaudio_extension import permit_import

if TYPE_CHECKING:
    from relax_actors.errors import RelaxError, RowError
    from relax_actors.registry import RoleSpec
    from relax_actors.runtime import Drop, Role, Row, StatefulRole

__version__ = "0.1.0"
__all__ = ["Drop", "RelaxError", "Role", "RoleSpec", "Row", "RowError", "StatefulRole"]

_MODULES = {
    "Drop": "runtime",
    "RelaxError": "errors",
    "Role": "runtime",
    "RoleSpec": "registry",
    "Row": "runtime",
    "RowError": "errors",
    "StatefulRole": "runtime",
}

permit_import()


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import relax_actors` stays cheap (PEP 562)."""
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

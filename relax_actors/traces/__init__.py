"""Recorded samples as exact traces, and the formats that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.lazy import lazy

if TYPE_CHECKING:
    from relax_actors.traces.model import Trace, TraceError
    from relax_actors.traces.rows import traces_of, trajectory_of
else:
    __getattr__ = lazy(__name__)

__all__ = ["Trace", "TraceError", "traces_of", "trajectory_of"]

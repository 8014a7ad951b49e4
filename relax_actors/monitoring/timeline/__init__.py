"""Timeline of a run: what each actor did when, by the broker's clock."""

from __future__ import annotations

from relax_actors.monitoring.timeline.builder import Builder
from relax_actors.monitoring.timeline.chrome import chrome_trace
from relax_actors.monitoring.timeline.lanes import laid_out
from relax_actors.monitoring.timeline.span import Instant, Span, Timeline

__all__ = ["Builder", "Instant", "Span", "Timeline", "chrome_trace", "laid_out"]

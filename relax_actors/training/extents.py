"""Rows that a live run needs, and bounded rows below its floor for its recorder.

The recorder is an observer, so nothing waits for it. The root publishes its position with its own lease. Without a
recorder, and without room, the collector removes all rows below the floor.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace

from broker.table import Fill
from relax_actors.algorithms.schedules import is_evaluated
from relax_actors.messages import Checkpoint, Weights
from relax_actors.record.position import Position, first_unread, position_of, read_versions
from relax_actors.runtime import Context
from relax_actors.training.strays import Extent

TABLE_SHARE, DISK_SHARE = 0.5, 0.125
"""Share of the table's limit from which no rows stay; share of the store's free space that their arrays may take."""


class UnreadRows:
    """Extends the rows that a run needs by those that its recorder has not read."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: Position | None = None

    def extend(self, extent: Extent, fill: Fill) -> Extent:
        """Return an extent with a lower floor, without unread evaluations."""
        table, state = self._context.table, self._context.state
        # A root that is being restarted has no lease: then its recorder is where it was.
        self._known = position_of(table.call(state.lease("root", 0))) or self._known
        if self._known is None or fill.size > TABLE_SHARE * fill.max_size > 0:
            return extent
        floor = first_unread(extent.floor, self._known.step, self._bytes_of, self._room())
        return replace(extent, floor=floor, results=read_versions(extent.results, self._known.version))

    def _bytes_of(self, step: int) -> int:
        """Return the bytes of the segments of a step."""
        with suppress(OSError), os.scandir(self._context.table.store.root / "group" / str(step)) as entries:
            return sum(entry.stat().st_size for entry in entries)
        return 0

    def _room(self) -> int:
        """Return the bytes that segments of unread rows may take."""
        with suppress(OSError):
            return int(DISK_SHARE * shutil.disk_usage(self._context.table.store.root).free)
        return 0


def read_extent(context: Context, well_formed: set[str]) -> Extent:
    """Read which rows a run may have; `well_formed` are subjects of evaluations."""
    table, config = context.table, context.config
    results = table.subjects.numbered("evaluation", "")
    weights = table.fetch_last("weights", Weights)
    checkpoint = table.fetch_last("checkpoint", Checkpoint)
    return Extent(
        steps=config.run.steps,
        rows=config.trainer.prompts_per_step,
        lead=config.staleness.max,
        version=-1 if weights is None else weights.version,
        floor=0 if checkpoint is None else checkpoint.floor,
        eval_rows=0 if config.eval is None else config.eval.total_rows,
        evaluated=lambda version: config.eval is not None and is_evaluated(config, version),
        results=frozenset(table.subjects.parse(s).step for s in well_formed if s.startswith(results)),
    )

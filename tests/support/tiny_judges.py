"""A judge that is slow and fails, for runs of processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from relax_actors.errors import EngineError
from relax_actors.roles.judge import Judge
from relax_actors.runtime import Row

FAILED_OF_TEN, BROKEN = (2, 5, 8), 2


class BadJudge(Judge):
    """Judge that is slow, and fails three of ten calls; with `broken`, those of the first two rows of a step always."""

    broken: bool = False
    _calls = 0

    def handle_many(self, rows: Sequence[Row]) -> list[Any]:
        """Wait, then fail or grade the rows."""
        self._calls += 1
        time.sleep(0.02)
        if self._calls % 10 in FAILED_OF_TEN or (self.broken and any(row.id.index < BROKEN for row in rows)):
            msg = "the judge has no grade this time"
            raise EngineError(msg)
        return super().handle_many(rows)

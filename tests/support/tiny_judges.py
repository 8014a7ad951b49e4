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
    """Judge that is slow, and fails three of ten calls; with `broken`, only and always the first two rows of a step."""

    broken: bool = False
    _calls = 0

    def handle_many(self, rows: Sequence[Row]) -> list[Any]:
        """Wait, then fail or grade the rows."""
        self._calls += 1
        time.sleep(0.02)
        if not self.broken and self._calls % 10 in FAILED_OF_TEN:
            raise self._error()
        graded = super().handle_many(rows)
        failed = [self.broken and row.id.index < BROKEN for row in rows]
        return [self._error() if fails else grade for fails, grade in zip(failed, graded, strict=True)]

    @staticmethod
    def _error() -> EngineError:
        return EngineError("the judge has no grade this time")

"""Limit on the rows that a server generates at once, adapted to its key-value cache."""

from __future__ import annotations


class RowLimit:
    """Limit with additive increase, and multiplicative decrease when samples are retracted.

    Args:
        max_rows: upper bound and initial value of the limit.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows, self._rows_without_retraction = max_rows, 0
        self.limit = max_rows
        """Rows that the server may generate at once."""

    def row_finished(self, *, retracted: bool) -> None:
        """Adapt the limit to a finished row.

        Args:
            retracted: whether the server put a sample of the row back into its queue because the cache was full.
        """
        if retracted:
            self.limit, self._rows_without_retraction = max(1, self.limit // 2), 0
            return
        self._rows_without_retraction += 1
        if self._rows_without_retraction >= self.limit:
            self.limit, self._rows_without_retraction = min(self._max_rows, self.limit + 1), 0

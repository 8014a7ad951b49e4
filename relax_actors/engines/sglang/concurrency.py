"""How many rows a server works on at once: as many as its memory of keys and values bears."""

from __future__ import annotations


class Concurrency:
    """Additive increase, multiplicative decrease: a server that puts samples back for want of room gets fewer rows.

    Args:
        most: rows at once, at most; where it starts.
    """

    def __init__(self, most: int) -> None:
        self._most, self.limit, self._calm = most, most, 0

    def finished(self, *, put_back: bool) -> None:
        """A row has ended; `put_back` says whether one of its samples had to wait for room in mid-generation."""
        if put_back:
            self.limit, self._calm = max(1, self.limit // 2), 0
            return
        self._calm += 1
        if self._calm >= self.limit:
            self.limit, self._calm = min(self._most, self.limit + 1), 0

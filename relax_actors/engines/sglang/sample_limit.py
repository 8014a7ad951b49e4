"""Limit on the samples that a server generates at once, adapted to its key-value cache."""

from __future__ import annotations


class SampleLimit:
    """Limit with additive increase, and multiplicative decrease when samples are retracted.

    Args:
        most: upper bound and initial value of the limit.
        step: samples of a row, by which the limit grows.
    """

    def __init__(self, most: int, step: int = 1) -> None:
        self._most, self._step, self._without_retraction = most, step, 0
        self.limit = most
        """Samples that the server may generate at once; a request alone may have more."""

    def finished(self, samples: int, *, retracted: bool) -> None:
        """Adapt the limit to a finished request.

        Args:
            samples: number of samples of the request.
            retracted: whether the server put one of them back into its queue because the cache was full.
        """
        if retracted:
            self.limit, self._without_retraction = max(1, self.limit // 2), 0
            return
        self._without_retraction += samples
        if self._without_retraction >= self.limit:
            self.limit, self._without_retraction = min(self._most, self.limit + self._step), 0

"""Deterministic shares: each source is always within one row of its share of the rows since the weights changed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Stop = Literal["first", "all"]
_LIMIT = 1 << 45
"""Rows beyond which the end of a mixture is not looked for."""


@lru_cache(maxsize=64)
def _period(weights: tuple[Fraction, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each row of a period, and which row of this source it is `[period] int64`.

    Row n (from 0) goes to the source with the earliest deadline among those that are behind their share: with c rows so
    far and weight w these are the sources with c < (n + 1) w, and their deadline is the last n with (n + 1) w < c + 2,
    at which the next row keeps the share from being missed by one. Such an order exists for all weights
    (R. Tijdeman, "The chairman assignment problem", 1980), and the earliest deadline first finds it
    (S. Baruah and others, "Proportionate progress", 1996).
    """
    period = lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * period) for weight in weights]
    counts = [0] * len(parts)
    sources, ordinals = np.zeros(period, np.int64), np.zeros(period, np.int64)
    for n in range(period):
        behind = [k for k, part in enumerate(parts) if counts[k] * period < (n + 1) * part]
        k = min(behind, key=lambda k: (-(-(counts[k] + 1) * period // parts[k]), k))
        sources[n], ordinals[n] = k, counts[k]
        counts[k] += 1
    return sources, ordinals


class Shares:
    """Assignment of rows to sources by constant weights, which add up to 1."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self._weights = tuple(weights)
        self._sources, self._ordinals = _period(self._weights)

    def at(self, n: int) -> tuple[int, int]:
        """Return the source of row n, and how many rows it had before."""
        periods, rest = divmod(n, len(self._sources))
        k = int(self._sources[rest])
        return k, periods * int(self._weights[k] * len(self._sources)) + int(self._ordinals[rest])

    def counts(self, n: int) -> list[int]:
        """Return how many of the first n rows each source has."""
        periods, rest = divmod(n, len(self._sources))
        begun = np.bincount(self._sources[:rest], minlength=len(self._weights)).tolist()
        return [
            periods * int(weight * len(self._sources)) + own for weight, own in zip(self._weights, begun, strict=True)
        ]


class Plan:
    """Assignment of the rows of a run to the sources of a mixture, whose weights may change at given rows.

    A stage is its first row, ascending from 0, and its weights.
    """

    def __init__(self, stages: Sequence[tuple[int, Sequence[Fraction]]]) -> None:
        self._firsts = [first for first, _ in stages]
        self._shares = [Shares(weights) for _, weights in stages]
        sources = len(stages[0][1])
        lengths = np.diff(self._firsts).tolist()
        passed = [shares.counts(length) for shares, length in zip(self._shares, lengths, strict=False)]
        self._before = np.cumsum([[0] * sources, *passed], axis=0).tolist()

    def at(self, n: int) -> tuple[int, int]:
        """Return the source of row n, and how many rows it had before."""
        stage = bisect_right(self._firsts, n) - 1
        k, ordinal = self._shares[stage].at(n - self._firsts[stage])
        return k, self._before[stage][k] + ordinal

    def counts(self, n: int) -> list[int]:
        """Return how many of the first n rows each source has."""
        stage = bisect_right(self._firsts, n) - 1
        own = self._shares[stage].counts(n - self._firsts[stage])
        return [before + count for before, count in zip(self._before[stage], own, strict=True)]

    def length(self, sizes: Sequence[int], stop: Stop) -> int | None:
        """Return the rows until a mixture ends; None if it never does, as a source gets no more rows.

        Args:
            sizes: rows that each source has to give.
            stop: "first": no source gives more than it has; "all": each source gives all that it has.
        """

        def ended(n: int) -> bool:
            pairs = zip(self.counts(n), sizes, strict=True)
            return any(c > size for c, size in pairs) if stop == "first" else all(c >= size for c, size in pairs)

        high = 1
        while not ended(high):
            high *= 2
            if high > _LIMIT:
                return None
        low = high // 2  # not ended, or 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if ended(middle) else (middle, high)
        return high - 1 if stop == "first" else high

"""Statistics of short series in plain Python: importing numpy would take longer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Series = Sequence[tuple[int, float]]
"""(step, value) in the order of the steps."""


def values(series: Series) -> list[float]:
    """Return the values of a series."""
    return [value for _, value in series]


def level(series: Series) -> float:
    """Return the median of a series; 0 without values."""
    return statistics.median(values(series)) if series else 0.0


def ends(series: Series, share: float = 0.25, least: int = 3) -> tuple[float, float] | None:
    """Return the medians of a series' first and last values; None if it is short.

    Either end has the `share` of the values, and at least `least`.
    """
    size = max(least, int(share * len(series)))
    if len(series) < 2 * size:
        return None
    return level(series[:size]), level(series[-size:])


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Pearson's correlation of two series; 0 if constant or shorter than 3."""
    if len(a) < 3 or min(a) == max(a) or min(b) == max(b):  # noqa: PLR2004
        return 0.0
    try:
        return statistics.correlation(a, b)
    except statistics.StatisticsError:  # numbers so close that their variance rounds to 0
        return 0.0


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's correlation of two series; 0 if constant or shorter than 3."""
    return correlation(_ranks(a), _ranks(b)) if len(a) >= 3 else 0.0  # noqa: PLR2004


def partial_correlation(a: Sequence[float], b: Sequence[float], given: Sequence[float]) -> float:
    """Return the partial correlation of two series, given a third one."""
    ab, ag, bg = correlation(a, b), correlation(a, given), correlation(b, given)
    rest = (1.0 - ag * ag) * (1.0 - bg * bg)
    return (ab - ag * bg) / rest**0.5 if rest > 1e-12 else 0.0  # noqa: PLR2004


def _ranks(numbers: Sequence[float]) -> list[float]:
    """Return the rank of each number; equal numbers share the mean of their ranks."""
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    ranks = [0.0] * len(numbers)
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and numbers[order[end]] == numbers[order[begin]]:
            end += 1
        for i in order[begin:end]:
            ranks[i] = (begin + end - 1) / 2
        begin = end
    return ranks

"""Data source that mixes others, and the plan of which source each row of a run comes from.

Each source is always within one row of its share of the rows since the weights changed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import lcm
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from relax_actors.config.data import DataSection
from relax_actors.config.sources import exact_weights
from relax_actors.data.fields import check_index
from relax_actors.data.source import Blocks, DataSource, SourceSettings, blocks_of
from relax_actors.data.sources import open_source
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError

SOURCE = "source"
"""Field of the metadata of a row that names its source; a field of the row with this name is replaced."""
_BLOCK_ROWS = 8192
"""Rows of a block of a source whose rows can be read in any order."""
Stop = Literal["first", "all"]
_LIMIT = 1 << 45
"""Rows beyond which the end of a mixture is not looked for."""


def open_mixture(settings: SourceSettings) -> Mixture:
    """Open the sources of a mixture; raises ConfigError with the name of a bad one."""
    if not settings.mixture:
        msg = "data.mixture is not set; data.kind = 'mixture' needs it"
        raise ConfigError(msg)
    if settings.size is not None or settings.rows is not None:
        msg = "data.size and data.rows belong to a source of the mixture; set them in [data.mixture.<name>]"
        raise ConfigError(msg)
    parts = {}
    for name, own in settings.mixture.items():
        try:
            parts[name] = open_source(**own, media_bytes=settings.media_bytes)
        except ConfigError as error:
            msg = f"data.mixture.{name}: {error}"
            raise type(error)(msg) from error
    return Mixture(parts)


class Mixture:
    """The tasks of several sources in a row; metadata names the source of each."""

    def __init__(self, parts: Mapping[str, DataSource]) -> None:
        self.parts = dict(parts)
        self._names, self._sources = [*parts], [*parts.values()]
        self.starts = [*accumulate((len(part) for part in self._sources), initial=0)]
        given = [blocks_of(part) for part in self._sources]
        limits = [blocks.held for blocks in given if blocks is not None]
        if limits:
            sizes = [_blocks(part) for part in self._sources]
            self.blocks = Blocks(np.concatenate(sizes), min(limits))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, i: int) -> Task:
        check_index(i, len(self))
        k = bisect_right(self.starts, i) - 1
        task = self._sources[k][i - self.starts[k]]
        return replace(task, metadata=task.metadata | {SOURCE: self._names[k]})


def _blocks(source: DataSource) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if (blocks := blocks_of(source)) is not None:
        return blocks.sizes
    full, rest = divmod(len(source), _BLOCK_ROWS)
    return np.array([_BLOCK_ROWS] * full + [rest] * bool(rest), np.int64)


def first_items(source: DataSource, count: int) -> list[int]:
    """Return up to `count` first items; of a mixture, those of each source in turn."""
    if not isinstance(source, Mixture):
        return list(range(min(count, len(source))))
    longest = max(map(len, source.parts.values()))
    items: Iterator[int] = (
        start + i
        for i in range(longest)
        for start, part in zip(source.starts, source.parts.values(), strict=False)
        if i < len(part)
    )
    return [item for item, _ in zip(items, range(count), strict=False)]


def plan_of(data: DataSection, rows_per_step: int) -> Plan | None:
    """Return the source of each row of a run; None if all sources are one data set."""
    first = {name: part.weight for name, part in data.mixture.items() if part.weight is not None}
    if not first:
        return None
    stages = [(0, first), *((stage.step * rows_per_step, stage.weights) for stage in data.curriculum)]
    exact = [(row, exact_weights(weights)) for row, weights in stages]
    return Plan([(row, [weights.get(name, Fraction(0)) for name in first]) for row, weights in exact])


def rows_of_epochs(data: DataSection, source: DataSource, epochs: int, rows_per_step: int) -> int:
    """Return the rows of epochs; of a weighted mixture, until `data.stop` ends it.

    Raises:
        ConfigError: it does not end, as the last weights leave out a source that is not done.
    """
    plan = plan_of(data, rows_per_step)
    if plan is None or not isinstance(source, Mixture):
        return epochs * len(source)
    sizes = [epochs * len(part) for part in source.parts.values()]
    rows = plan.length(sizes, data.stop)
    if rows is None:
        msg = (
            f"run.epochs = {epochs}: the last weights of data.mixture leave out a source that has rows left, so that "
            "the run does not end; set run.steps in place of run.epochs"
        )
        raise ConfigError(msg)
    return max(1, rows)


def shares_of(data: DataSection, source: Mixture, rows: int, rows_per_step: int) -> Sequence[str]:
    """Describe what a run takes from each source of a mixture."""
    plan = plan_of(data, rows_per_step)
    sizes = [len(part) for part in source.parts.values()]
    counts = [rows * size / sum(sizes) for size in sizes] if plan is None else plan.counts(rows)
    return [
        f"{name} {count / rows:.0%} ({size} rows, {count / size:.2g} times)"
        for name, size, count in zip(source.parts, sizes, counts, strict=True)
    ]


@lru_cache(maxsize=64)
def _period(weights: tuple[Fraction, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each row's source in a period, and its number in it, `[period] int64`.

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
    """Assignment of rows to the sources of a mixture, with weights that may change.

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
        """Return the rows until a mixture ends; None if a source never runs out.

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

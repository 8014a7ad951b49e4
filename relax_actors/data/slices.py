"""A part of a data source, by numbers or shares of its rows: `data.rows`."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np

from relax_actors.data.fields import check_index
from relax_actors.data.source import Blocks, DataSource, blocks_of
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError

_BOUND = re.compile(r"(-?\d+)|(\d+(?:\.\d+)?)%")


class Sliced:
    """Rows `start` to `stop` of a source."""

    def __init__(self, source: DataSource, start: int, stop: int) -> None:
        self._source, self._start, self._size = source, start, stop - start
        whole = blocks_of(source)
        if whole is not None:
            ends = np.cumsum(whole.sizes).clip(start, stop)
            sizes = np.diff(ends, prepend=start)
            self.blocks = Blocks(sizes[sizes > 0], whole.held)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Task:
        check_index(i, self._size)
        return self._source[self._start + i]


def sliced(source: DataSource, rows: str | None) -> DataSource:
    """Return the rows of a source that `data.rows` means, or all; raises ConfigError for no slice and no rows."""
    if rows is None:
        return source
    size = len(source)
    first, colon, last = rows.partition(":")
    if not colon:
        raise _malformed(rows)
    start, stop = _bound(first, rows, size, 0), _bound(last, rows, size, size)
    if start >= stop:
        msg = f"data.rows = {rows!r} takes none of the {size} rows; widen it"
        raise ConfigError(msg)
    return Sliced(source, start, stop)


def _bound(text: str, rows: str, size: int, default: int) -> int:
    """Return a bound in rows, between 0 and `size`; shares are rounded down, so that adjacent slices fit together."""
    if not text.strip():
        return default
    match = _BOUND.fullmatch(text.strip())
    if match is None:
        raise _malformed(rows)
    number = int(size * Fraction(match[2]) / 100) if match[2] else int(match[1])
    return max(0, min(size, number + size if number < 0 else number))


def _malformed(rows: str) -> ConfigError:
    return ConfigError(f'data.rows = {rows!r} is no slice; write "0:1000", "-200:" or "0%:90%"')

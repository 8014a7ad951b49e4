"""Open the data source that a configuration names."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np

from relax_actors.data.fields import check_index
from relax_actors.data.source import Blocks, DataSource, SourceSettings, blocks_of
from relax_actors.data.task import Task
from relax_actors.errors import ConfigError, RowError
from relax_actors.registry.catalog import DATA_SOURCES

_LISTED, _TRIED = 3, 10_000
_BOUND = re.compile(r"(-?\d+)|(\d+(?:\.\d+)?)%")


def open_source(kind: str, **settings: Any) -> DataSource:
    """Open a data source by its name or dotted path; `settings` are fields of `SourceSettings`.

    Raises:
        ConfigError: unknown kind, missing or wrong setting, package not installed, or not one usable row.
    """
    given = SourceSettings(**settings)
    if given.size is not None and given.size < 1:
        msg = f"data.size = {given.size}: a source needs at least 1 task; leave it out to use all tasks"
        raise ConfigError(msg)
    make = DATA_SOURCES.load(kind, "data.kind")
    if not callable(make):
        msg = f"data.kind = {kind!r} is a {type(make).__name__}; name a function of SourceSettings"
        raise ConfigError(msg)
    source: DataSource = make(given)
    if missing := [name for name in ("__len__", "__getitem__") if not hasattr(source, name)]:
        msg = f"data.kind = {kind!r} returned a {type(source).__name__} without {missing[0]}; return a sequence of Task"
        raise ConfigError(msg)
    source = sliced(source, given.rows)
    where = next((name for name in ("path", "task", "function") if getattr(given, name) is not None), None)
    shown = f"data.kind = {kind!r}" if where is None else f"data.{where} = {str(getattr(given, where))!r}"
    _require_a_good_row(source, shown)
    return source


def _require_a_good_row(source: DataSource, where: str) -> None:
    """Read up to the first usable row, and not more than `_TRIED`.

    A malformed row is quarantined later; a source with malformed rows only is a wrong setting.
    """
    errors: list[str] = []
    tried = min(len(source), _TRIED)
    for i in range(tried):
        try:
            source[i]
        except RowError as error:
            if len(errors) < _LISTED:
                errors.append(str(error))
        else:
            return
    more = f" (and {tried - len(errors)} more)" if tried > len(errors) else ""
    rows = f"{tried}" if tried == len(source) else f"the first {tried}"
    msg = f"{where}: not one of {rows} rows is good: {' | '.join(errors)}{more}"
    raise ConfigError(msg)


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
    """Return the rows of `data.rows`; raises ConfigError for a bad or empty slice."""
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
    """Return a bound in rows within `size`; shares are rounded down."""
    if not text.strip():
        return default
    match = _BOUND.fullmatch(text.strip())
    if match is None:
        raise _malformed(rows)
    number = int(size * Fraction(match[2]) / 100) if match[2] else int(match[1])
    return max(0, min(size, number + size if number < 0 else number))


def _malformed(rows: str) -> ConfigError:
    return ConfigError(f'data.rows = {rows!r} is no slice; write "0:1000", "-200:" or "0%:90%"')

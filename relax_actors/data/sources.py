"""Open the data source that a configuration names."""

from __future__ import annotations

from typing import Any

from relax_actors.data.slices import sliced
from relax_actors.data.source import DataSource, SourceSettings
from relax_actors.errors import ConfigError, RowError
from relax_actors.registry.catalog import DATA_SOURCES

_LISTED, _TRIED = 3, 10_000


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

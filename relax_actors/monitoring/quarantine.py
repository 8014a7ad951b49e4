"""Quarantined rows of a run, read from its table."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from broker.subjects import RowId
from broker.table import Table
from relax_actors.errors import CodecError, ConfigError, StoreError
from relax_actors.messages import Quarantined, Readmitted, Requeued
from relax_actors.monitoring.connection import Connected
from relax_actors.monitoring.render import fields_of
from relax_actors.runtime.row import ROW_KINDS, parse_row


def quarantined_rows(table: Table) -> list[tuple[RowId, Quarantined]]:
    """Return the quarantined rows; the error of a cell that does not decode says why."""
    columns = [table.subjects.column("quarantined", kind) for kind in ROW_KINDS]
    return [(c.row, _decode(table, cell.data)) for c, cell in table.snapshot(columns)]


def quarantined_row(at: Connected, row: RowId) -> Quarantined:
    """Return the quarantined cell of a row; raises ConfigError if the row is not quarantined."""
    cell = at.table.get(at.table.subject(row, "quarantined"))
    if cell is None:
        msg = (
            f"{row} is not quarantined in run {at.config.run.name}; `relax quarantine list RUN` lists the rows that are"
        )
        raise ConfigError(msg)
    return _decode(at.table, cell.data)


def requeued_rows(table: Table) -> set[RowId]:
    """Return the rows that an operator requeued."""
    return {row for row, _ in _readable(table, "requeued", Requeued)}


def readmitted_rows(table: Table) -> dict[RowId, str]:
    """Return for each requeued row the new row that has its task."""
    return {row: cell.row for row, cell in _readable(table, "readmitted", Readmitted)}


def requeue(at: Connected, names: list[str], *, everything: bool) -> int:
    """Request new rows for the tasks of quarantined rows; each row is requeued once.

    Returns:
        The number of rows requeued.

    Raises:
        ConfigError: the run is finished, a row is not quarantined, or no row was named.
    """
    if at.folder.summary.exists():
        msg = f"run {at.config.run.name} is finished; raise run.steps and `relax up` it to train more rows"
        raise ConfigError(msg)
    rows = [row for row, _ in quarantined_rows(at.table)] if everything else [parse_row(name) for name in names]
    if not everything:
        for row in rows:
            quarantined_row(at, row)
    if not rows and not everything:
        msg = "name rows to requeue, e.g. group.12.3, or give --all; `relax quarantine list RUN` lists them"
        raise ConfigError(msg)
    cell = Requeued(time.time())
    return sum(at.table.put_all((at.table.subject(row, "requeued"), cell) for row in rows if row.kind == "group"))


def row_cells(table: Table, row: RowId, columns: list[str]) -> dict[str, str]:
    """Return the fields of a row's cells by column, each as one line of text."""
    names = [name for name in columns if name != "quarantined"]
    cells = table.get_all(table.subject(row, name) for name in names)
    return {name: fields_of(cell.data) for name, cell in zip(names, cells, strict=True) if cell is not None}


def _decode(table: Table, data: bytes) -> Quarantined:
    try:
        return table.read(data, Quarantined)
    except (CodecError, StoreError) as error:
        return Quarantined("?", 0, f"unreadable: {error}", "")


def _readable(table: Table, name: str, expected: type[Any]) -> list[tuple[RowId, Any]]:
    readable = []
    for c, cell in table.snapshot([table.subjects.column(name)]):
        with suppress(CodecError, StoreError):
            readable.append((c.row, table.read(cell.data, expected)))
    return readable

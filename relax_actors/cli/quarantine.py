"""`relax quarantine list | show | requeue`: the rows that hurt whoever handled them."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from broker.subjects import RowId
from broker.table import Table
from relax_actors.errors import CodecError, ConfigError, StoreError
from relax_actors.messages import Quarantined, Readmitted, Requeued
from relax_actors.monitoring.connection import Connected, connected
from relax_actors.monitoring.render import fields_of, printable
from relax_actors.runtime import COLUMNS


def list_rows(run: str, *, as_json: bool) -> None:
    """List quarantined rows."""
    with connected(run) as at:
        found = _quarantined(at.table)
        requeued = {row for row, _ in _readable(at.table, "requeued", Requeued)}
        again = {row: cell.row for row, cell in _readable(at.table, "readmitted", Readmitted)}
    if as_json:
        for row, cell in found:
            body = {
                "row": str(row),
                "role": cell.role,
                "deliveries": cell.deliveries,
                "error": cell.error,
                "requeued": row in requeued,
                "readmitted": again.get(row),
            }
            sys.stdout.write(json.dumps(body) + "\n")
        return
    shown = RichTable("row", "role", "deliveries", "error", "requeued")
    for row, cell in found:
        fate = again.get(row, "waits" if row in requeued else "")
        error = (cell.error.splitlines() or [""])[0][:500]
        shown.add_row(*map(escape, (str(row), cell.role, str(cell.deliveries), error, fate)))
    Console().print(shown if found else "nothing is quarantined")


def show_row(run: str, row: str) -> None:
    """Show a quarantined row with its traceback and its inputs."""
    with connected(run) as at:
        wanted, cell = _existing(at, row)
        inputs = _inputs(at.table, wanted, [*COLUMNS, *at.config.roles])
    typer.echo(printable(f"{wanted} quarantined by {cell.role} after {cell.deliveries} deliveries"))
    typer.echo(printable(cell.error))
    typer.echo(printable(cell.traceback))
    for name, fields in inputs.items():
        typer.echo(printable(f"{name}: {fields}"))


def requeue(run: str, rows: list[str], *, everything: bool) -> int:
    """Have the tasks of quarantined rows admitted again, as new rows; gives how many were asked for.

    Raises:
        ConfigError: a row is not quarantined, or none was named.
    """
    with connected(run) as at:
        if at.folder.summary.exists():
            msg = f"run {at.config.run.name} is finished; raise run.steps and `relax up` it to train more rows"
            raise ConfigError(msg)
        wanted = [row for row, _ in _quarantined(at.table)] if everything else [_existing(at, row)[0] for row in rows]
        if not wanted and not everything:
            msg = "name rows to requeue, e.g. group.12.3, or give --all; `relax quarantine list RUN` shows them"
            raise ConfigError(msg)
        cell = Requeued(time.time())
        return sum(at.table.put_all((at.table.subject(row, "requeued"), cell) for row in wanted if row.kind == "group"))


def _existing(at: Connected, text: str) -> tuple[RowId, Quarantined]:
    row = RowId.parse(text)
    cell = at.table.get(at.table.subject(row, "quarantined"))
    if cell is None:
        msg = f"{row} is not quarantined in run {at.config.run.name}; `relax quarantine list RUN` lists what is"
        raise ConfigError(msg)
    return row, _read(at.table, cell.data)


def _quarantined(table: Table) -> list[tuple[RowId, Quarantined]]:
    columns = [table.subjects.column("quarantined", kind) for kind in ("group", "eval")]
    return [(c.row, _read(table, cell.data)) for c, cell in table.snapshot(columns)]


def _read(table: Table, data: bytes) -> Quarantined:
    """What a cell says; of one that cannot be read, that and why."""
    try:
        return table.read(data, Quarantined)
    except (CodecError, StoreError) as error:
        return Quarantined("?", 0, f"unreadable: {error}", "")


def _readable(table: Table, name: str, expected: type[Any]) -> list[tuple[RowId, Any]]:
    found = []
    for c, cell in table.snapshot([table.subjects.column(name)]):
        with suppress(CodecError, StoreError):
            found.append((c.row, table.read(cell.data, expected)))
    return found


def _inputs(table: Table, row: RowId, columns: list[str]) -> dict[str, Any]:
    names = [name for name in columns if name != "quarantined"]
    cells = table.get_all(table.subject(row, name) for name in names)
    return {name: fields_of(cell.data) for name, cell in zip(names, cells, strict=True) if cell is not None}

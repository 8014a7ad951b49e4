"""`relax quarantine list | show | requeue`: the quarantined rows of a run."""

from __future__ import annotations

import json as json_module
import sys
from typing import Annotated

import typer

from relax_actors.cli.options import Broker, Credentials, RunName

quarantine = typer.Typer(help="Inspect and requeue quarantined rows.", no_args_is_help=True)


@quarantine.command("list")
def list_rows(
    run: RunName,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON a row.")] = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """List the quarantined rows."""
    from rich.table import Table

    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.monitoring.quarantine import quarantined_rows, readmitted_rows, requeued_rows
    from relax_actors.monitoring.screen import Screen
    from relax_actors.printable import printable

    with connected(run, Access(broker, credentials)) as at:
        rows = quarantined_rows(at.table)
        requeued, readmitted = requeued_rows(at.table), readmitted_rows(at.table)
    if json:
        for row, cell in rows:
            body = {
                "row": str(row),
                "role": cell.role,
                "deliveries": cell.deliveries,
                "error": cell.error,
                "requeued": row in requeued,
                "readmitted": readmitted.get(row),
            }
            sys.stdout.write(json_module.dumps(body) + "\n")
        return
    shown = Table("row", "role", "deliveries", "error", "requeued as")
    for row, cell in rows:
        successor = readmitted.get(row, "(pending)" if row in requeued else "")
        error = (cell.error.splitlines() or [""])[0][:500]
        shown.add_row(*map(printable, (row, cell.role, cell.deliveries, error, successor)))
    Screen().print(shown if rows else "nothing is quarantined")


@quarantine.command("show")
def show_row(
    run: RunName,
    row: Annotated[str, typer.Argument(help="Row, e.g. group.12.3.", metavar="ROW")],
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Show a quarantined row with its traceback and its columns."""
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.monitoring.quarantine import quarantined_row, row_cells
    from relax_actors.monitoring.screen import Screen
    from relax_actors.printable import printable, printable_lines
    from relax_actors.runtime import COLUMNS
    from relax_actors.runtime.row import parse_row

    row_id = parse_row(row)
    with connected(run, Access(broker, credentials)) as at:
        cell = quarantined_row(at, row_id)
        columns = row_cells(at.table, row_id, [*COLUMNS, *at.config.roles])
    screen = Screen()
    screen.show(printable(f"{row_id} quarantined by {cell.role} after {cell.deliveries} deliveries"))
    for text in (cell.error, cell.traceback):
        screen.show(printable_lines(text.rstrip("\n"), "  "))
    for name, fields in columns.items():
        screen.show(printable(f"{name}: {fields}"))


@quarantine.command("requeue")
def requeue(
    run: RunName,
    rows: Annotated[list[str] | None, typer.Argument(help="Rows, e.g. group.12.3.", metavar="ROW")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Requeue all quarantined rows.")] = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Requeue the tasks of quarantined rows as new rows, after the cause is fixed."""
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.monitoring.quarantine import requeue as requeue_rows

    with connected(run, Access(broker, credentials)) as at:
        count = requeue_rows(at, rows or [], everything=everything)
    typer.echo(f"{count} rows will be admitted again")

"""`relax ledger`: what became of every row of a run, read from its table."""

from __future__ import annotations

import json as json_module
import sys

import typer

from relax_actors.cli.options import AsJson, Broker, Credentials, RunName


def ledger(run: RunName, json: AsJson = False, broker: Broker = None, credentials: Credentials = None) -> None:
    """Account for every row of a run, live or over.

    Exit code 1 if a row is lost or trained twice, else 0.
    """
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.monitoring.screen import Screen
    from relax_actors.monitoring.summary import accounting, read_ledger
    from relax_actors.printable import printable

    with connected(run, Access(broker, credentials)) as at:
        rows = read_ledger(at.table, at.settings)
    account, violations = rows.account(), rows.violations()
    body = {"run": at.settings.run.name, "steps": rows.version or 0, **accounting(rows)}
    if json:
        sys.stdout.write(json_module.dumps(body) + "\n")
    else:
        screen = Screen()
        screen.show(
            f"admitted {account.admitted} = trained {account.trained} + dropped {account.dropped} + quarantined "
            f"{account.quarantined} + in flight {account.in_flight}"
        )
        for violation in violations:
            screen.show(printable(f"violation: {violation}"))
        ended = account.trained + account.dropped + account.quarantined
        complete = account.admitted == ended + account.in_flight and not violations
        screen.show("the ledger is complete" if complete else "the ledger does not add up")
    raise typer.Exit(1 if violations else 0)

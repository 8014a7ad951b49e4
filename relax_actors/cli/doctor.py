"""`relax doctor`: what is wrong with a run."""

from __future__ import annotations

import json as json_module
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import AsJson, Broker, CertificateAuthority, Credentials

if TYPE_CHECKING:
    from relax_actors.monitoring.health import Finding


def doctor(
    run: Annotated[str | None, typer.Argument(help="Name or folder of the run.", metavar="RUN")] = None,
    json: AsJson = False,
    broker: Broker = None,
    credentials: Credentials = None,
    ca: CertificateAuthority = None,
) -> None:
    """Say what is wrong with a run, and what to do about it.

    Looks at the broker, supervisors, roles, consumers, the table, quarantined rows, the ledger and disks. Exit code 0
    if the run is healthy or finished, 1 if not.
    """
    from relax_actors.errors import RelaxError
    from relax_actors.monitoring.connection import find
    from relax_actors.monitoring.health import Finding

    if broker is None or _is_here(run):
        find(_given(run))  # a wrong name is no finding
    try:
        name, found = _examine(run, broker, credentials, ca)
    except RelaxError as error:
        name, found = run or str(broker), [Finding(str(error))]
    problems = [finding for finding in found if finding.is_problem]
    if json:
        body = {
            "run": name,
            "healthy": not problems,
            "problems": [finding.text for finding in problems],
            "notes": [finding.text for finding in found if not finding.is_problem],
        }
        sys.stdout.write(json_module.dumps(body) + "\n")
    else:
        _print(name, found)
    raise typer.Exit(1 if problems else 0)


def _examine(
    run: str | None, broker: Broker, credentials: Credentials, ca: CertificateAuthority
) -> tuple[str, list[Finding]]:
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.monitoring.examination import connected_by_address, examine, operator_of

    if broker is not None and not _is_here(run):
        name, address = operator_of(run, broker, credentials, ca)
        with connected_by_address(name, address) as at:
            return name, examine(at)
    with connected(_given(run), Access(broker, credentials)) as at:
        return at.config.run.name, examine(at)


def _given(run: str | None) -> str:
    from relax_actors.errors import ConfigError

    if run is None:
        msg = "name the run or its broker: relax doctor RUN, or --broker nats://host:port --credentials DIR"
        raise ConfigError(msg)
    return run


def _is_here(run: str | None) -> bool:
    """Whether this machine has the folder of the run."""
    from contextlib import suppress

    from relax_actors.errors import ConfigError
    from relax_actors.monitoring.connection import find

    if run is not None:
        with suppress(ConfigError):
            find(run)
            return True
    return False


def _print(name: str, found: list[Finding]) -> None:
    from relax_actors.monitoring.screen import Screen
    from relax_actors.printable import printable

    screen = Screen()
    for finding in found:
        screen.show(printable(f"{'problem' if finding.is_problem else 'note'}: {finding.text}"))
    if not any(finding.is_problem for finding in found):
        screen.show(printable(f"run {name} is healthy"))

"""`relax doctor`: what is wrong with a run."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import AsJson, Broker, CertificateAuthority, Credentials

if TYPE_CHECKING:
    from relax_actors.monitoring.finding import Finding

RECORDED = ".jsonl.gz"
"""How the name of a file with recorded observations ends."""


def doctor(
    run: Annotated[
        str | None, typer.Argument(help=f"Name or folder of the run, or a *{RECORDED} file of --save.", metavar="RUN")
    ] = None,
    json: AsJson = False,
    save: Annotated[
        Path | None,
        typer.Option(help=f"Also write what the rules read to this *{RECORDED} file, without secrets.", metavar="FILE"),
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List the rules, and exit.")] = False,
    broker: Broker = None,
    credentials: Credentials = None,
    ca: CertificateAuthority = None,
) -> None:
    """Say what is wrong with a run, live or finished, and what to do about it.

    Looks at the broker, supervisors, roles, consumers, the table, quarantined rows, the ledger and disks, and applies
    rules to its figures and events, whether it is live or finished. Exit code 0 if there is no problem, 1 if there is
    one; notes do not count.
    """
    from relax_actors.errors import RelaxError
    from relax_actors.monitoring.connection import find
    from relax_actors.monitoring.finding import Finding

    if rules:
        _print_rules()
        return
    _check_file_name(save)
    if run is not None and run.endswith(RECORDED):
        name, findings = _recorded(Path(run))
    else:
        if broker is None or _is_here(run):
            find(_given(run))  # a wrong name is no finding
        try:
            name, findings = _examine(run, broker, credentials, ca, save)
        except RelaxError as error:
            name, findings = run or str(broker), [Finding(str(error))]
    is_healthy = not any(finding.is_problem for finding in findings)
    if json:
        body = {"run": name, "healthy": is_healthy, "findings": [finding.json() for finding in findings]}
        sys.stdout.write(json_module.dumps(body) + "\n")
    else:
        _print(name, findings)
    raise typer.Exit(0 if is_healthy else 1)


def _check_file_name(save: Path | None) -> None:
    from relax_actors.errors import ConfigError

    if save is not None and not save.name.endswith(RECORDED):
        msg = f"--save {save}: the name must end in {RECORDED}, by which `relax doctor FILE` knows the file"
        raise ConfigError(msg)


def _recorded(path: Path) -> tuple[str, list[Finding]]:
    from relax_actors.monitoring.diagnosis import diagnose
    from relax_actors.monitoring.diagnosis.log_reader import load_observed

    seen = load_observed(path)
    return seen.run, diagnose(seen)


def _examine(
    run: str | None, broker: Broker, credentials: Credentials, ca: CertificateAuthority, save: Path | None
) -> tuple[str, list[Finding]]:
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.monitoring.diagnosis.log_reader import save_observed
    from relax_actors.monitoring.examination import connected_by_address, examine, operator_of

    if broker is not None and not _is_here(run):
        name, address = operator_of(run, broker, credentials, ca)
        context = connected_by_address(name, address)
    else:
        context = connected(_given(run), Access(broker, credentials))
    with context as at:
        if save is not None:
            count = save_observed(at.table, at.config.model_dump(mode="json"), save)
            sys.stderr.write(f"wrote {count} messages to {save}\n")
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


def _print(name: str, findings: list[Finding]) -> None:
    from relax_actors.monitoring.screen import Screen
    from relax_actors.printable import printable

    screen = Screen()
    for finding in findings:
        remedy = f". {finding.remedy[:1].upper()}{finding.remedy[1:]}" if finding.remedy else ""
        rule = f" [{finding.rule}]" if finding.rule else ""
        screen.show(printable(f"{finding.severity}: {finding.text}{remedy}{rule}"))
        for evidence in finding.evidence:
            screen.show(printable(f"    {evidence.line()}"), "dim")
    if not any(finding.is_problem for finding in findings):
        screen.show(printable(f"run {name} is healthy"))


def _print_rules() -> None:
    from relax_actors.monitoring.diagnosis import RULES

    for name in RULES.names():
        spec = RULES.load(name, "rule").spec
        sys.stdout.write(f"{name:24} {spec.what}{f' ({spec.source})' if spec.source else ''}\n")

"""`relax operations`: list and cancel operations, add and remove external engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import Broker, Credentials, RunName

if TYPE_CHECKING:
    from relax_actors.messages.operations import OperationRequest
    from relax_actors.monitoring.access import Access
    from relax_actors.operations import Operation

operations = typer.Typer(help="List and cancel operations; add and remove external engines.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON an operation.")]
Timeout = Annotated[float, typer.Option(help="Seconds that the operation may take; 0 for its default.")]


@operations.command("list")
def list_operations(
    run: RunName, as_json: AsJson = False, broker: Broker = None, credentials: Credentials = None
) -> None:
    """List the operations of a run, with the seconds that each took."""
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.operations import OperationLog
    from relax_actors.printable import printable

    with connected(run, Access(broker, credentials)) as at:
        shown = OperationLog(at.table).read().operations.values()
    for operation in shown:
        typer.echo(json.dumps(operation.shown()) if as_json else printable(line_of(operation)))
    if not shown and not as_json:
        typer.echo("the run has had no operation")


@operations.command("cancel")
def cancel(
    run: RunName,
    number: Annotated[int, typer.Argument(help="Number of the operation.", metavar="NUMBER")],
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Cancel an operation that is PENDING, CREATING or CONNECTING."""
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.operations import OperationLog

    with connected(run, Access(broker, credentials)) as at:
        typer.echo(line_of(OperationLog(at.table).cancel(number, "cancelled by relax operations")))


@operations.command("add-engine")
def add_engine(
    run: RunName,
    url: Annotated[str, typer.Argument(help="Address of an SGLang server that serves the run's model.", metavar="URL")],
    key_file: Annotated[Path | None, typer.Option(help="File with the API key of the server.")] = None,
    timeout: Timeout = 0.0,
    as_json: AsJson = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Let an inference server that the run did not start join it, and wait until it takes part."""
    from relax_actors.errors import ConfigError
    from relax_actors.messages.operations import OperationRequest
    from relax_actors.monitoring.access import Access

    try:
        key = "" if key_file is None else key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"--key-file {key_file} cannot be read: {error}; give a file with the key of the server"
        raise ConfigError(msg) from error
    request = OperationRequest("add_engine", url=url, seconds=timeout, author="relax operations")
    _carry_out(run, request, key, Access(broker, credentials), as_json=as_json)


@operations.command("remove-engine")
def remove_engine(
    run: RunName,
    number: Annotated[int, typer.Argument(help="Number of the operation that added the engine.", metavar="NUMBER")],
    force: Annotated[bool, typer.Option("--force", help="Return its rows at once instead of finishing them.")] = False,
    timeout: Timeout = 0.0,
    as_json: AsJson = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Let an external engine finish its rows and leave."""
    from relax_actors.messages.operations import OperationRequest
    from relax_actors.monitoring.access import Access

    request = OperationRequest("remove_engine", engine=number, force=force, seconds=timeout, author="relax operations")
    _carry_out(run, request, "", Access(broker, credentials), as_json=as_json)


def _carry_out(run: str, request: OperationRequest, key: str, access: Access, *, as_json: bool) -> None:
    """Request an operation, wait for its end, and show its states."""
    from dataclasses import replace

    from relax_actors.cli.scaling import require_live, wait_for
    from relax_actors.errors import ConfigError
    from relax_actors.monitoring.connection import connected
    from relax_actors.operations import OperationLog
    from relax_actors.operations.engines import discard_key, save_key

    with connected(run, access) as at:
        require_live(at)
        log = OperationLog(at.table)
        store = at.table.store.root
        request = replace(request, key_file=save_key(store, key))
        try:
            begun = log.request(request)
        except ConfigError:
            discard_key(store, request.key_file)
            raise
        (operation,) = wait_for(at, log, [begun], lambda text: typer.echo(text, err=True))
    typer.echo(json.dumps(operation.shown()) if as_json else line_of(operation))


def line_of(operation: Operation) -> str:
    """Describe an operation in one line."""
    from relax_actors.monitoring.leases import SHOWN_VERSION

    times, plan, request = list(operation.times.values()), operation.plan, operation.request
    what = request.url or (f"engine {request.engine}" if request.engine is not None else request.role)
    change = f" {plan.before} to {plan.after} on node {plan.node_name}" if plan is not None else ""
    if plan is not None and plan.code:
        change = f", code {plan.old_code[:SHOWN_VERSION]} to {plan.code[:SHOWN_VERSION]} on node {plan.node_name}"
    if plan is not None and request.kind == "move_role":
        source = f" from node {plan.source} {plan.source_name}" if plan.source >= 0 else ""
        change = f"{source} to node {plan.node} {plan.node_name}"
    reason = f": {operation.reason}" if operation.reason else ""
    seconds = times[-1] - times[0]
    return f"{operation.id} {request.kind} {what}{change}, {operation.state} after {seconds:.1f} s{reason}"

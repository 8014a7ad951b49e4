"""`relax roles`: add, remove and move roles of a live run, and replace their code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import Broker, ConfigPath, Credentials, RunName

if TYPE_CHECKING:
    from relax_actors.messages.operations import OperationRequest
    from relax_actors.monitoring.connection import Connected

roles = typer.Typer(help="List, add, remove, replace and move the roles of a run that is up.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name of the role; `roles.` may stand before it.", metavar="ROLE")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
Timeout = Annotated[float, typer.Option(help="Seconds that the operation may take; 0 for its default.")]


@roles.command("list")
def list_roles(run: RunName, as_json: AsJson = False, broker: Broker = None, credentials: Credentials = None) -> None:
    """List the roles of a run: columns, actors, and the code version of each actor."""
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected
    from relax_actors.monitoring.role_list import lines_of, roles_of
    from relax_actors.printable import printable

    with connected(run, Access(broker, credentials)) as at:
        shown = roles_of(at)
    for line in [json.dumps(role) for role in shown] if as_json else lines_of(shown):
        typer.echo(line if as_json else printable(line))


@roles.command("add")
def add(
    config: ConfigPath,
    role: Name,
    run: Annotated[str, typer.Option(help="Name or folder of the run, if not that of CONFIG.")] = "",
    timeout: Timeout = 0.0,
    as_json: AsJson = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Add a role of a TOML file to the run while it is up, and wait until its actors take part."""
    from relax_actors.checks.role_addition import settings_of_addition
    from relax_actors.cli.scaling import require_live
    from relax_actors.config import load_config
    from relax_actors.messages.operations import OperationRequest
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected

    file, name = load_config(config), _bare(role)
    with connected(run or str(file.folder), Access(broker, credentials)) as at:
        require_live(at)
        settings = json.dumps(settings_of_addition(file, at.config, name))
        request = OperationRequest("add_role", name, settings=settings, seconds=timeout, author="relax roles")
        _carry_out(at, request, as_json=as_json)


@roles.command("remove")
def remove(
    run: RunName,
    role: Name,
    force: Annotated[bool, typer.Option("--force", help="Return its rows at once instead of finishing them.")] = False,
    timeout: Timeout = 0.0,
    as_json: AsJson = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Remove a role whose column no other role reads, and wait until its actors have left."""
    from relax_actors.messages.operations import OperationRequest

    request = OperationRequest("remove_role", _bare(role), force=force, seconds=timeout, author="relax roles")
    _in_run(run, request, broker, credentials, as_json=as_json)


@roles.command("replace")
def replace(
    run: RunName,
    role: Name,
    timeout: Timeout = 0.0,
    as_json: AsJson = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Restart the actors of a role with the code on disk, one by one, on all nodes.

    Each actor must handle a row before the next one is restarted. If one fails, all get the previous code back.
    """
    from relax_actors.messages.operations import OperationRequest

    request = OperationRequest("replace_role", _bare(role), seconds=timeout, author="relax roles")
    _in_run(run, request, broker, credentials, as_json=as_json)


@roles.command("move")
def move(
    run: RunName,
    role: Name,
    node: Annotated[str, typer.Argument(help="Number or name of the node; that of `relax up` is 0.", metavar="NODE")],
    timeout: Timeout = 0.0,
    as_json: AsJson = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Move a role with state, such as the trainer, to another node, and wait for it.

    It stops on its node after what it does now, and goes on from its last checkpoint on the other. If it does not start
    there, it comes back.
    """
    from relax_actors.messages.operations import OperationRequest

    request = OperationRequest("move_role", _bare(role), node=node, seconds=timeout, author="relax roles")
    _in_run(run, request, broker, credentials, as_json=as_json)


def _bare(role: str) -> str:
    return role.removeprefix("roles.")


def _in_run(run: str, request: OperationRequest, broker: Broker, credentials: Credentials, *, as_json: bool) -> None:
    from relax_actors.cli.scaling import require_live
    from relax_actors.monitoring.access import Access
    from relax_actors.monitoring.connection import connected

    with connected(run, Access(broker, credentials)) as at:
        require_live(at)
        _carry_out(at, request, as_json=as_json)


def _carry_out(at: Connected, request: OperationRequest, *, as_json: bool) -> None:
    """Request an operation, wait for its end, and show its states."""
    from relax_actors.cli.operations import line_of
    from relax_actors.cli.scaling import wait_for
    from relax_actors.operations import OperationLog

    log = OperationLog(at.table)
    (operation,) = wait_for(at, log, [log.request(request)], lambda text: typer.echo(text, err=True))
    typer.echo(json.dumps(operation.shown()) if as_json else line_of(operation))

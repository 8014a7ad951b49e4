"""`relax scale`: change the number of actors of a role while the run is up."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from relax_actors.cli.options import Broker, Credentials, RunName


def scale(
    run: RunName,
    roles: Annotated[
        list[str],
        typer.Argument(help="Numbers of actors: role=number, or role=+number and role=-number.", metavar="ROLE=NUMBER"),
    ],
    node: Annotated[str, typer.Option(help="Number or name of the node to scale.")] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Surplus actors return their rows at once instead of finishing them.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds until a start fails, or until actors that still finish rows must leave.")
    ] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the operations as JSON.")] = False,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Scale the actors of a role while the run is up.

    Each change is an operation of the run: it goes on if this command, or the run's supervisor, is killed. Surplus
    actors finish their current rows, then exit.
    """
    from relax_actors.cli.scaling import ScaleOptions, plans_of, scale_roles
    from relax_actors.monitoring.access import Access

    access, options = Access(broker, credentials), ScaleOptions(node, force=force, seconds=timeout)
    if dry_run:
        for role, plan in plans_of(run, roles, options, access).items():
            changed = f": {' '.join(plan.actors)}" if plan.actors else ""
            line = f"{role}: {plan.before} to {plan.after} actors on node {plan.node} {plan.node_name}{changed}"
            shown = {"role": role, "before": plan.before, "after": plan.after, "node": plan.node, "actors": plan.actors}
            typer.echo(json.dumps(shown) if as_json else line)
        return
    finished = scale_roles(run, roles, options, access, on_state=lambda text: typer.echo(text, err=True))
    for operation in finished:
        number = 0 if operation.plan is None else operation.plan.after
        typer.echo(json.dumps(operation.shown()) if as_json else f"{operation.request.role}: {number} actors")

"""`relax scale`: change the number of actors of a role while the run is up."""

from __future__ import annotations

from typing import Annotated

import typer

from relax_actors.cli.options import Broker, Credentials, RunName


def scale(
    run: RunName,
    roles: Annotated[list[str], typer.Argument(help="Numbers of actors: role=number ...", metavar="ROLE=NUMBER")],
    node: Annotated[str | None, typer.Option(help="Number or name of the node to scale.")] = None,
    broker: Broker = None,
    credentials: Credentials = None,
) -> None:
    """Scale the actors of a role while the run is up.

    Surplus actors finish their current rows, then exit.
    """
    from relax_actors.cli.scaling import scale_roles
    from relax_actors.monitoring.access import Access

    for role, number in scale_roles(run, roles, node, Access(broker, credentials)).items():
        typer.echo(f"{role}: {number} actors")

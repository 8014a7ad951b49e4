"""`relax keys`: credentials of a run's users, and the configuration of their server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_actors.cli.options import Overrides


def keys(
    run: Annotated[str, typer.Argument(help="TOML file, or name or folder of a run.", metavar="RUN")],
    folder: Annotated[Path, typer.Argument(help="Folder to write to.", metavar="DIR")],
    settings: Overrides = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Create a certificate authority and a certificate of the server.")
    ] = False,
    mutual: Annotated[
        bool, typer.Option("--mutual", help="Like --tls, with a certificate for each user, which the server requires.")
    ] = False,
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address of the server in its certificate; may be repeated.")
    ] = None,
    days: Annotated[float | None, typer.Option(help="Days until the credentials expire.")] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Revoke all credentials of the run created before; it may be up.")
    ] = False,
    server: Annotated[
        Path | None,
        typer.Option(help="Folder with the server of another run, which admits this run, too. Default: DIR."),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the run from its server, and its credentials from DIR.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the credentials of another run in DIR, which must be over.")
    ] = False,
    listen: Annotated[
        str, typer.Option(help="Address that the server listens on; 0.0.0.0:4222 for clients on other machines.")
    ] = "127.0.0.1:4222",
    websocket: Annotated[
        int | None, typer.Option(help="Port for WebSocket clients, on the same host. Default: no WebSocket.")
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(help="Page that may use WebSocket, e.g. https://HOST; may be repeated. Default: same origin."),
    ] = None,
    store: Annotated[Path | None, typer.Option(help="Folder of the server's files. Default: DIR/server/store.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Names of the servers of a cluster, e.g. nats-1,nats-2,nats-3.")
    ] = None,
    http: Annotated[
        int | None, typer.Option(help="Port for monitoring without a password, on the same host. Default: none.")
    ] = None,
) -> None:
    """Create the credentials of a run's users and the configuration of their server.

    Users are the roles, an operator and an observer. Run again, it creates the users again and keeps the server's keys.
    """
    from relax_actors.cli.credential_files import make_keys, remove_run
    from relax_actors.cli.listeners import Settings

    servers = tuple(cluster.split(",")) if cluster else ()
    chosen = Settings(
        tls=tls or mutual,
        mutual=mutual,
        hosts=tuple(host or ()),
        days=days,
        rotate=rotate,
        replace=replace,
        server=server,
        listen=listen,
        websocket=websocket,
        store=store,
        cluster=servers,
        http=http,
        origins=tuple(origin or ()),
    )
    lines = remove_run(run, folder, chosen) if remove else make_keys(run, folder, settings or [], chosen)
    for line in lines:
        typer.echo(line)

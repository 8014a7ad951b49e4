"""`relax keys`: credentials of a run's users, and the configuration of their server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_actors.cli.options import Overrides

if TYPE_CHECKING:
    from broker.keyed_server import KeyedServer
    from broker.listeners import Settings
    from broker.server_keys import Users
    from relax_actors.config import Config

SLACK_BYTES = 64 << 20
Hosts = Annotated[
    list[str] | None,
    typer.Option(help="Name or address of the server in its certificate; may be repeated."),
]
Server = Annotated[
    Path | None,
    typer.Option(help="Folder with the server of another run, which admits this run, too. Default: DIR."),
]
Listen = Annotated[
    str,
    typer.Option(help="Address that the server listens on; 0.0.0.0:4222 for clients on other machines."),
]
WebSocket = Annotated[
    int | None,
    typer.Option(help="Port for WebSocket clients, on the same host. Default: no WebSocket."),
]
Origins = Annotated[
    list[str] | None,
    typer.Option(help="Page that may use WebSocket, e.g. https://HOST; may be repeated. Default: same origin."),
]
Cluster = Annotated[str | None, typer.Option(help="Names of the servers of a cluster, e.g. nats-1,nats-2,nats-3.")]
Monitoring = Annotated[
    int | None,
    typer.Option(help="Port for monitoring without a password, on the same host. Default: none."),
]
Tls = Annotated[bool, typer.Option("--tls", help="Create a certificate authority and a certificate of the server.")]
Mutual = Annotated[
    bool,
    typer.Option("--mutual", help="Like --tls, with a certificate for each user, which the server requires."),
]
Rotate = Annotated[
    bool,
    typer.Option("--rotate", help="Revoke all credentials of the run created before; it may be up."),
]
Remove = Annotated[bool, typer.Option("--remove", help="Remove the run from its server, and its credentials from DIR.")]
Replace = Annotated[
    bool,
    typer.Option("--replace", help="Replace the credentials of another run in DIR, which must be over."),
]


def keys(
    run: Annotated[str, typer.Argument(help="TOML file, or name or folder of a run.", metavar="RUN")],
    folder: Annotated[Path, typer.Argument(help="Folder to write to.", metavar="DIR")],
    settings: Overrides = None,
    tls: Tls = False,
    mutual: Mutual = False,
    host: Hosts = None,
    days: Annotated[float | None, typer.Option(help="Days until the credentials expire.")] = None,
    rotate: Rotate = False,
    server: Server = None,
    remove: Remove = False,
    replace: Replace = False,
    listen: Listen = "127.0.0.1:4222",
    websocket: WebSocket = None,
    origin: Origins = None,
    store: Annotated[Path | None, typer.Option(help="Folder of the server's files. Default: DIR/server/store.")] = None,
    cluster: Cluster = None,
    http: Monitoring = None,
) -> None:
    """Create the credentials of a run's users and the configuration of their server.

    Users are the roles, an operator and an observer. Run again, it creates the users again and keeps the server's keys.
    """
    from broker.listeners import Settings

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


def make_keys(run: str, folder: Path, overrides: list[str], settings: Settings) -> list[str]:
    """Write the credentials of a run's users; return lines about files and commands."""
    from broker.run_keys import write_run_keys
    from broker.server_keys import Users
    from broker.streams import STATE_BYTES
    from relax_actors.roles.permissions import permissions, users

    config = _config_of(run, overrides)
    granted = Users(config.run.name, {user: permissions(config, user) for user in users(config)})
    broker = config.broker
    quota = broker.replicas * (broker.max_bytes + broker.log_bytes + STATE_BYTES) + SLACK_BYTES
    server, chosen = write_run_keys(folder, granted, settings, max_bytes=quota, sync_interval=broker.sync_interval)
    return _report(run, granted, folder.resolve(), server, chosen)


def remove_run(run: str, folder: Path, settings: Settings) -> list[str]:
    """Remove a run from its server; return lines about what is left to do."""
    from broker.run_keys import remove_run_keys
    from relax_actors.config import load_config

    name = load_config(Path(run), []).run.name if run.endswith(".toml") else Path(run).name
    server, account = remove_run_keys(name, folder, settings)
    return [
        f"run {name} is removed from the server in {server.folder}, and its credentials from {folder.resolve()}",
        _reload(server),
        f"its streams are kept: to free their space, remove the folder jetstream/{account} in the store of each server",
    ]


def _report(run: str, users: Users, folder: Path, server: KeyedServer, settings: Settings) -> list[str]:
    from broker.address import CREDENTIALS_FILE

    scheme, host = "tls" if settings.tls else "nats", settings.host if settings.is_loopback else "HOST"
    url = f"{scheme}://{host}:{settings.listen.rpartition(':')[2]}"
    others = [name for name in server.runs if name != users.run]
    is_own = server.folder == folder
    return [
        f"credentials of {', '.join(users.granted)}: {folder}/<user>/{CREDENTIALS_FILE}",
        *([_reload(server)] if settings.rotate or others else []),
        *([f"the server: nats-server -c {server.files}/nats-server.conf"] if is_own else []),
        f"the run: relax up {run} broker.url={url} broker.credentials={folder}",
        *([f"other runs of the server: {', '.join(others)}"] if others else []),
        *(["for clients on other machines: add --listen 0.0.0.0:4222"] if settings.is_loopback and is_own else []),
    ]


def _reload(server: KeyedServer) -> str:
    return f"to apply: have each server reload {server.files}/auth.conf, kill -HUP PID; connections of others stay"


def _config_of(run: str, overrides: list[str]) -> Config:
    from relax_actors.config import load_config
    from relax_actors.errors import ConfigError
    from relax_actors.monitoring.connection import find

    if run.endswith(".toml"):
        return load_config(Path(run), overrides)
    if overrides:
        msg = f"settings apply to a TOML file; {run!r} is a run with settings of its own; leave them out"
        raise ConfigError(msg)
    return find(run).load_config()

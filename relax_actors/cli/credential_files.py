"""Credentials of a run's users, and the configuration of their NATS server."""

from __future__ import annotations

import json
import secrets
import socket
import time
from dataclasses import replace
from pathlib import Path

from broker.address import CREDENTIALS_FILE
from broker.credentials import OperatorKeys
from broker.files import write_private
from broker.permissions import OBSERVER, OPERATOR
from broker.server import MAX_PAYLOAD
from relax_actors.cli.credential_folder import prepare_folders
from relax_actors.cli.listeners import Settings, tls_block
from relax_actors.config import Config, load_config
from relax_actors.errors import ConfigError
from relax_actors.monitoring.connection import find
from relax_actors.roles.permissions import permissions, users

BROWSERS = (OBSERVER, OPERATOR)
"""Users that may connect over WebSocket."""
DAY = 86400.0
CA_DAYS, SERVER_DAYS = 3650.0, 825.0
HOSTS = ("localhost", "127.0.0.1", "nats")


def make_keys(run: str, folder: Path, overrides: list[str], settings: Settings) -> list[str]:
    """Write the credentials of all users of a run and the configuration of their server.

        DIR/<user>/nats.creds     credentials of a user; with TLS also ca.pem, cert.pem and key.pem
        DIR/server/               nats-server.conf, auth.conf, certificate; <name>.conf for each server of a cluster
        DIR/private/              keys of the issuing authority: keep them secret and copy them to no other machine

    Args:
        run: TOML file, or name or folder of a run.
        folder: DIR; created if needed.
        overrides: `section.key=value` each, with a TOML file.
        settings: options.

    Returns:
        Lines of text that name the files and the commands that use them.

    Raises:
        ConfigError: no such run, or the folder holds something else (see `prepare_folders`).
        BrokerError: the authority's keys cannot be read.
    """
    config = _config_of(run, overrides)
    names, granted = users(config), {user: permissions(config, user) for user in users(config)}
    folder = folder.resolve()
    private, server = folder / "private", folder / "server"
    prepare_folders(folder, names, config.run.name, replace_run=settings.replace)
    authority = _authority(private / "keys.json", rotate=settings.rotate)
    expires = None if settings.days is None else time.time() + settings.days * DAY
    for user in names:
        account = None if user == OPERATOR else authority.account_of(user)
        text = authority.credentials(
            f"{config.run.name}.{user}", granted[user], expires, account=account, websocket=user in BROWSERS
        )
        write_private(folder / user / CREDENTIALS_FILE, text)
    if settings.tls:
        _certificates(folder, names, settings)
    else:
        # A client with a ca.pem beside its credentials refuses servers without TLS.
        _remove(folder, names, ("ca.pem", "cert.pem", "key.pem"))
    others = {user: permitted for user, permitted in granted.items() if user != OPERATOR}
    (server / "auth.conf").write_text(authority.server_config(others))
    (server / "nats-server.conf").write_text(server_config(config, server, settings))
    if settings.cluster:
        password = _route_password(private / "route.json")
        for name in settings.cluster:
            text = server_config(config, server, settings) + settings.cluster_block(name, server, password)
            write_private(server / f"{name}.conf", text)
    scheme, host = "tls" if settings.tls else "nats", settings.host if settings.is_loopback else "HOST"
    url = f"{scheme}://{host}:{settings.listen.rpartition(':')[2]}"
    reload = f"to refuse the credentials before: have each server reload {server}/auth.conf, kill -HUP PID"
    return [
        f"credentials of {', '.join(names)}: {folder}/<user>/{CREDENTIALS_FILE}",
        *([reload] if settings.rotate else []),
        f"the server: nats-server -c {server}/nats-server.conf",
        f"the run: relax up {run} broker.url={url} broker.credentials={folder}",
        *(["for clients on other machines: add --listen 0.0.0.0:4222"] if settings.is_loopback else []),
    ]


def server_config(config: Config, folder: Path, settings: Settings) -> str:
    """Return the configuration of one server; it holds no secret."""
    quote = json.dumps
    lines = [
        f"listen: {quote(settings.listen)}",
        f"max_payload: {MAX_PAYLOAD}",
        "write_deadline: 10s",
        'include "auth.conf"',
        "jetstream {",
        f"  store_dir: {quote(str((settings.store or folder / 'store').resolve()))}",
        f"  max_memory_store: {256 << 20}",
        f"  max_file_store: {config.broker.max_bytes + config.broker.log_bytes + (1 << 30)}",
        f"  sync_interval: {quote(config.broker.sync_interval)}",
        "}",
    ]
    if settings.tls:
        lines += ["tls {", tls_block(folder, mutual=settings.mutual), "}"]
    return "\n".join([*lines, *settings.lines(folder)]) + "\n"


def _route_password(path: Path) -> str:
    """Return the password of the routes between the servers of a cluster; created once."""
    if not path.exists():
        write_private(path, json.dumps(secrets.token_urlsafe(24)))
    return str(json.loads(path.read_text()))


def _config_of(run: str, overrides: list[str]) -> Config:
    if run.endswith(".toml"):
        return load_config(Path(run), overrides)
    if overrides:
        msg = f"settings apply to a TOML file; {run!r} is a run with settings of its own; leave them out"
        raise ConfigError(msg)
    return find(run).load_config()


def _authority(path: Path, *, rotate: bool) -> OperatorKeys:
    known = OperatorKeys.load(path) if path.exists() else None
    if known is None or rotate:
        # One second back: times are whole seconds, and credentials issued in this second must be valid.
        known = OperatorKeys.new() if known is None else replace(known, revoked=int(time.time()) - 1)
        known.save(path)
    return known


def _remove(folder: Path, users: list[str], files: tuple[str, ...]) -> None:
    for path in (folder / user / name for user in users for name in files):
        path.unlink(missing_ok=True)


def _certificates(folder: Path, names: list[str], settings: Settings) -> None:
    """Write the authority if missing, and the certificates of the server and of users."""
    from broker import certificates

    ca_files = folder / "private" / "ca.pem", folder / "private" / "ca-key.pem"
    if not all(path.exists() for path in ca_files):
        certificates.new_authority(CA_DAYS).save(*ca_files)
    ca = certificates.CertificatePair.load(*ca_files)
    hosts = tuple(dict.fromkeys((*settings.hosts, *settings.cluster, *HOSTS, socket.gethostname())))
    certificates.issue(ca, "nats", SERVER_DAYS, hosts).save(
        folder / "server" / "cert.pem", folder / "server" / "key.pem"
    )
    if not settings.mutual:
        _remove(folder, names, ("cert.pem", "key.pem"))
    for name in (*names, "server"):
        (folder / name / "ca.pem").write_text(ca.pem)
        if settings.mutual and name != "server":
            own = certificates.issue(ca, name, settings.days or SERVER_DAYS)
            own.save(folder / name / "cert.pem", folder / name / "key.pem")

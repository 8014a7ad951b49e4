"""Credentials of a run's users, and their admission to a server."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from broker.address import CREDENTIALS_FILE
from broker.credentials import OperatorKeys, read_claims
from broker.files import write_private
from broker.permissions import OBSERVER, OPERATOR
from broker.run_users import RunUsers
from broker.streams import STATE_BYTES
from relax_actors.cli.credential_folder import prepare_folders
from relax_actors.cli.keyed_server import KeyedServer, options_given
from relax_actors.cli.listeners import Settings
from relax_actors.config import Config, load_config
from relax_actors.errors import ConfigError
from relax_actors.monitoring.connection import find
from relax_actors.roles.permissions import permissions, users

BROWSERS = (OBSERVER, OPERATOR)
"""Users that may connect over WebSocket."""
DAY = 86400.0
SLACK_BYTES = 64 << 20
TLS_FILES = ("ca.pem", "cert.pem", "key.pem")


def make_keys(run: str, folder: Path, overrides: list[str], settings: Settings) -> list[str]:
    """Write the credentials of all users of a run, and admit them to its server.

        DIR/<user>/nats.creds     credentials of a user; with TLS also ca.pem, cert.pem and key.pem
        DIR/server, DIR/private   the server, unless `settings.server` names the folder of another (see `KeyedServer`)

    Args:
        run: TOML file, or name or folder of a run.
        folder: DIR; created if needed.
        overrides: `section.key=value` each, with a TOML file.
        settings: options.

    Returns:
        Lines of text that name the files and the commands that use them.

    Raises:
        ConfigError: no such run, no such server, or the folder holds something else (see `prepare_folders`).
        BrokerError: the authority's keys cannot be read.
    """
    config, folder = _config_of(run, overrides), folder.resolve()
    server = KeyedServer(folder if settings.server is None else settings.server.resolve())
    is_own = server.folder == folder
    if not is_own:
        _check_joined(server, settings)
    names = users(config)
    replaced = prepare_folders(folder, names, config.run.name, has_server=is_own, replace_run=settings.replace)
    with server.lock():
        # Written again without options, e.g. to rotate keys, a server must not lose its TLS or its address.
        if server.is_configured and not options_given(settings):
            settings = replace(settings, **server.options())
        authority = server.authority()
        if is_own:
            server.configure(config, settings)
        if replaced in server.runs:
            server.remove(server.runs[replaced])
        _write_users(config, folder, server, authority, settings)
        return _report(run, config, folder, server, settings)


def _write_users(
    config: Config, folder: Path, server: KeyedServer, authority: OperatorKeys, settings: Settings
) -> None:
    """Write the credentials of the users of a run, and admit them to its server."""
    names, granted = users(config), {user: permissions(config, user) for user in users(config)}
    now = time.time()
    expires = None if settings.days is None else now + settings.days * DAY
    run = config.run.name
    revoked = _revoked(server.runs.get(run), server.removed(run), int(now), rotate=settings.rotate)
    for user in names:
        account = authority.account_of(run, "" if user == OPERATOR else user)
        name, issued = f"{run}.{user}", max(int(now), revoked + 1)
        text = authority.credentials(name, granted[user], account, expires, issued=issued, websocket=user in BROWSERS)
        write_private(folder / user / CREDENTIALS_FILE, text)
    # A client with a ca.pem beside its credentials refuses servers without TLS.
    _remove(folder, names, TLS_FILES[1:] if settings.tls else TLS_FILES)
    if settings.tls:
        server.write_user_certificates(folder, names, settings)
    others = {user: permitted for user, permitted in granted.items() if user != OPERATOR}
    server.admit(RunUsers(run, others, revoked, _quota(config)))


def remove_run(run: str, folder: Path, settings: Settings) -> list[str]:
    """Remove the accounts of a run from its server, and the run's credentials.

    Args:
        run: TOML file, or name or folder of a run, which need not exist any more.
        folder: folder of the run's credentials.
        settings: options; only `server` is used.

    Returns:
        Lines of text that say what is left to do.

    Raises:
        ConfigError: the server has no such run.
    """
    folder = folder.resolve()
    server = KeyedServer(folder if settings.server is None else settings.server.resolve())
    server.require()
    name = load_config(Path(run), []).run.name if run.endswith(".toml") else Path(run).name
    with server.lock():
        known = server.runs
        if name not in known:
            admitted = f"it has {', '.join(known)}" if known else "it has none"
            msg = f"the server in {server.folder} has no run {name!r}; {admitted}"
            raise ConfigError(msg)
        account = server.authority().account_of(name).public
        server.remove(known[name])
    for path in sorted(folder.glob(f"*/{CREDENTIALS_FILE}")):
        if read_claims(path).name.partition(".")[0] == name:
            _remove(folder, [path.parent.name], (CREDENTIALS_FILE, *TLS_FILES))
    return [
        f"run {name} is removed from the server in {server.folder}, and its credentials from {folder}",
        _reload(server),
        f"its streams are kept: to free their space, remove the folder jetstream/{account} in the store of each server",
    ]


def _check_joined(server: KeyedServer, settings: Settings) -> None:
    """Check the options of a run on the server of another run: TLS and address are those of the server.

    Raises:
        ConfigError: there is no such server, its options cannot be read, or an option is given that would change it.
    """
    server.require()
    server.options()
    if given := options_given(settings):
        option = given[0].removesuffix("s") if given[0] in ("hosts", "origins") else given[0]
        msg = f"--{option} changes the server, not a run: give it where {server.folder} is written, without --server"
        raise ConfigError(msg)


def _revoked(old: RunUsers | None, removed: int, now: int, *, rotate: bool) -> int:
    """Time up to which credentials of a run are refused. Times are whole seconds, and new ones are issued after it."""
    if old is None:
        # Those of a removed run of the same name must not become valid again, not even those of this second.
        return max(now, removed) + 1
    return max(now, old.revoked + 1) if rotate else old.revoked


def _quota(config: Config) -> int:
    broker = config.broker
    return broker.replicas * (broker.max_bytes + broker.log_bytes + STATE_BYTES) + SLACK_BYTES


def _report(run: str, config: Config, folder: Path, server: KeyedServer, settings: Settings) -> list[str]:
    scheme, host = "tls" if settings.tls else "nats", settings.host if settings.is_loopback else "HOST"
    url = f"{scheme}://{host}:{settings.listen.rpartition(':')[2]}"
    others = [name for name in server.runs if name != config.run.name]
    is_own = server.folder == folder
    return [
        f"credentials of {', '.join(users(config))}: {folder}/<user>/{CREDENTIALS_FILE}",
        *([_reload(server)] if settings.rotate or others else []),
        *([f"the server: nats-server -c {server.files}/nats-server.conf"] if is_own else []),
        f"the run: relax up {run} broker.url={url} broker.credentials={folder}",
        *([f"other runs of the server: {', '.join(others)}"] if others else []),
        *(["for clients on other machines: add --listen 0.0.0.0:4222"] if settings.is_loopback and is_own else []),
    ]


def _reload(server: KeyedServer) -> str:
    return f"to apply: have each server reload {server.files}/auth.conf, kill -HUP PID; connections of others stay"


def _config_of(run: str, overrides: list[str]) -> Config:
    if run.endswith(".toml"):
        return load_config(Path(run), overrides)
    if overrides:
        msg = f"settings apply to a TOML file; {run!r} is a run with settings of its own; leave them out"
        raise ConfigError(msg)
    return find(run).load_config()


def _remove(folder: Path, users: list[str], files: tuple[str, ...]) -> None:
    for path in (folder / user / name for user in users for name in files):
        path.unlink(missing_ok=True)

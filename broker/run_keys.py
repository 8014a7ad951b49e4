"""Credentials of a run's users, and their admission to a keyed server.

Their folder is private to its user, and holds nothing else.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from broker.address import CREDENTIALS_FILE
from broker.credentials import OperatorKeys, read_claims
from broker.errors import ConfigError, UnsafePathError
from broker.files import make_private_folder
from broker.keyed_server import KeyedServer, options_given
from broker.listeners import Settings
from broker.permissions import OBSERVER, OPERATOR
from broker.run_users import RunUsers
from broker.server_keys import Users

BROWSERS = (OBSERVER, OPERATOR)
"""Users that may connect over WebSocket."""
DAY = 86400.0
TLS_FILES = ("ca.pem", "cert.pem", "key.pem")
ROOT_USER = 0


def server_of(folder: Path, settings: Settings) -> KeyedServer:
    """Return the server of a run's credentials: the folder's own, or `settings.server`."""
    return KeyedServer((settings.server or folder).resolve())


def write_run_keys(
    folder: Path, users: Users, settings: Settings, *, max_bytes: int, sync_interval: str
) -> tuple[KeyedServer, Settings]:
    """Write the credentials of all users of a run, and admit them to its server.

        DIR/<user>/nats.creds     credentials of a user; with TLS also ca.pem, cert.pem and key.pem
        DIR/server, DIR/private   the server, unless `settings.server` names the folder of another (see `KeyedServer`)

    Args:
        folder: DIR; created if needed.
        users: users of the run.
        settings: options.
        max_bytes: bytes that all replicas of the run's streams may reserve together.
        sync_interval: interval between fsyncs of a server that is configured now.

    Returns:
        The server, and the options that it has.

    Raises:
        ConfigError: no such server, or the folder holds something else (see `prepare_folders`).
        BrokerError: the authority's keys cannot be read.
    """
    folder, server = folder.resolve(), server_of(folder, settings)
    is_own = server.folder == folder
    if not is_own:
        _check_joined(server, settings)
    replaced = prepare_folders(folder, list(users.granted), users.run, has_server=is_own, replace_run=settings.replace)
    with server.lock():
        # Written again without options, e.g. to rotate keys, a server must not lose its TLS or its address.
        if server.is_configured and not options_given(settings):
            settings = replace(settings, **server.options())
        authority = server.authority()
        if is_own:
            server.configure(settings, sync_interval)
        if replaced in server.runs:
            server.remove(server.runs[replaced])
        revoked = _write_users(folder, users, server, authority, settings)
        server.admit(RunUsers(users.run, users.others, revoked, max_bytes))
    return server, settings


def _write_users(folder: Path, users: Users, server: KeyedServer, authority: OperatorKeys, settings: Settings) -> int:
    """Write the credentials of a run's users; return up to when earlier ones are refused."""
    now = time.time()
    expires = None if settings.days is None else now + settings.days * DAY
    known, removed = server.runs.get(users.run), server.removed(users.run)
    revoked = _revoked(known, removed, int(now), rotate=settings.rotate)
    users.write_credentials(folder, authority, expires, issued=max(int(now), revoked + 1), browsers=BROWSERS)
    # A client with a ca.pem beside its credentials refuses servers without TLS.
    _remove(folder, list(users.granted), TLS_FILES[1:] if settings.tls else TLS_FILES)
    if settings.tls:
        server.write_user_certificates(folder, list(users.granted), settings)
    return revoked


def remove_run_keys(run: str, folder: Path, settings: Settings) -> tuple[KeyedServer, str]:
    """Remove a run from its server, with its credentials; raises ConfigError if unknown.

    Returns:
        The server, and the name of the account that owns the run's streams, which are kept.
    """
    folder, server = folder.resolve(), server_of(folder, settings)
    server.require()
    with server.lock():
        known = server.runs
        if run not in known:
            admitted = f"it has {', '.join(known)}" if known else "it has none"
            msg = f"the server in {server.folder} has no run {run!r}; {admitted}"
            raise ConfigError(msg)
        account = server.authority().account_of(run).public
        server.remove(known[run])
    for path in sorted(folder.glob(f"*/{CREDENTIALS_FILE}")):
        if read_claims(path).name.partition(".")[0] == run:
            _remove(folder, [path.parent.name], (CREDENTIALS_FILE, *TLS_FILES))
    return server, account


def _check_joined(server: KeyedServer, settings: Settings) -> None:
    """Check the options of a run on another run's server, which decides TLS and address.

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
    """Unix seconds up to which credentials are refused; new ones are issued after it."""
    if old is None:
        # Those of a removed run of the same name must not become valid again, not even those of this second.
        return max(now, removed) + 1
    return max(now, old.revoked + 1) if rotate else old.revoked


def _remove(folder: Path, users: list[str], files: tuple[str, ...]) -> None:
    for path in (folder / user / name for user in users for name in files):
        path.unlink(missing_ok=True)


def prepare_folders(folder: Path, users: list[str], run: str, *, has_server: bool, replace_run: bool) -> str:
    """Create the folders with mode 0700; return the run whose credentials are replaced.

    `has_server` says that the folder holds the files of the server, too, and `replace_run` that it may be another
    run's.

    Raises:
        ConfigError: the folder has other content, belongs to another user or another run, or cannot be written.
    """
    subfolders = [*(("private", "server") if has_server else ()), *users]
    path, replaced = folder, ""
    try:
        if folder.exists():
            _check_content(folder, subfolders)
            if has_server and not replace_run:
                _check_signing_keys(folder)
            replaced = _other_run(folder, run)
            if replaced and not replace_run:
                beside = f", with --server {folder} for a second run on its server" if has_server else ""
                msg = (
                    f"{folder} holds the credentials of run {replaced!r}, which would lose them; give another folder"
                    f"{beside}, or --replace if that run is over"
                )
                raise ConfigError(msg)
        for path in (folder, *(folder / name for name in subfolders)):
            if not (path == folder and _belongs_to_root(path)):
                make_private_folder(path)
    except UnsafePathError as error:
        msg = f"credentials cannot be written: {error}"
        raise ConfigError(msg) from error
    except OSError as error:
        msg = (
            f"credentials cannot be written to {path}: {error.strerror}; give a folder that user {os.geteuid()} owns "
            "(in a container: mount a volume there)"
        )
        raise ConfigError(msg) from error
    return replaced


def _belongs_to_root(folder: Path) -> bool:
    """Whether root owns the top folder, as in a container where volumes are mounted below it."""
    return folder.is_dir() and folder.stat().st_uid == ROOT_USER != os.geteuid()


def _check_content(folder: Path, subfolders: list[str]) -> None:
    if not folder.is_dir():
        msg = f"{folder} is not a folder; give another path"
        raise ConfigError(msg)
    if (folder / "private" / "keys.json").exists():
        return
    others = (path for path in folder.iterdir() if path.name not in subfolders)
    if other := sorted(path.name for path in others if not (_is_ignored(path) or (path / CREDENTIALS_FILE).exists())):
        msg = f"{folder} was not written by `relax keys`: it holds {', '.join(other[:3])}; give a new or empty folder"
        raise ConfigError(msg)


def _check_signing_keys(folder: Path) -> None:
    """Refuse to replace credentials that a server knows by ones that it does not know."""
    keys = folder / "private" / "keys.json"
    if not keys.exists() and any(folder.glob(f"*/{CREDENTIALS_FILE}")):
        msg = (
            f"{folder} holds credentials, but {keys}, which signs them, is missing: name the folder of their server "
            "with --server, restore that file, or give --replace if their run is over"
        )
        raise ConfigError(msg)


def _is_ignored(path: Path) -> bool:
    """Whether a path is hidden or an empty folder, as the volume of an absent role."""
    return path.name.startswith(".") or path.name == "lost+found" or (path.is_dir() and not any(path.iterdir()))


def _other_run(folder: Path, run: str) -> str:
    """Return the name of another run whose credentials are in the folder; empty without one."""
    names = [read_claims(path).name.partition(".")[0] for path in sorted(folder.glob(f"*/{CREDENTIALS_FILE}"))]
    return next((name for name in names if name != run), "")

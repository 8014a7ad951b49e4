"""Folder of a server that `relax keys` configured: configuration, signing keys and runs."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from broker import certificates
from broker.credentials import OperatorKeys
from broker.errors import ConfigError
from broker.files import make_private_folder, open_lock, write_private
from broker.listeners import Settings, tls_block
from broker.run_users import RunUsers
from broker.server import MAX_PAYLOAD

CA_DAYS, SERVER_DAYS = 3650.0, 825.0
HOSTS = ("localhost", "127.0.0.1", "nats")
OF_SERVER = ("tls", "mutual", "hosts", "listen", "websocket", "store", "cluster", "http", "origins")
"""Options that belong to the server, not to one of its runs."""
UNBOUNDED_BYTES = 1 << 50
"""Size of a server's store: the accounts of the runs bound it, and no reload could raise it for another run."""


@dataclass(frozen=True, slots=True)
class KeyedServer:
    """A server, by the folder that holds its files.

        DIR/server/          nats-server.conf, auth.conf, certificate; <name>.conf for each server of a cluster
        DIR/private/         keys of the issuing authority, and the users of each run

    Attributes:
        folder: DIR.
    """

    folder: Path

    @property
    def files(self) -> Path:
        """Folder of the files that the server reads."""
        return self.folder / "server"

    @property
    def private(self) -> Path:
        """Folder that no machine of the run needs."""
        return self.folder / "private"

    @property
    def runs(self) -> dict[str, RunUsers]:
        """The runs that the server admits, by name."""
        return RunUsers.load_all(self.private / "runs")

    def require(self) -> None:
        """Check that `relax keys` wrote this folder; raises ConfigError if it did not."""
        if not (self.private / "keys.json").is_file():
            msg = f"{self.folder} is no folder of a server: {self.private}/keys.json is missing; name the folder that "
            raise ConfigError(msg + "`relax keys` wrote for the first run of the server")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Wait for the lock of the folder: two writers at once would lose keys or runs.

        Raises:
            UnsafePathError: the lock is not this user's file.
        """
        file = open_lock(self.private / "lock")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def authority(self) -> OperatorKeys:
        """Return the signing keys, created once; raises BrokerError if their file is unreadable."""
        path = self.private / "keys.json"
        if path.exists():
            return OperatorKeys.load(path)
        keys = OperatorKeys.new()
        keys.save(path)
        return keys

    def admit(self, run: RunUsers) -> None:
        """Admit the users of a run, in place of those with the same run's name."""
        make_private_folder(self.private / "runs")
        run.save(self.private / "runs")
        self._write_accounts()

    def remove(self, run: RunUsers) -> None:
        """Remove the accounts of a run; its credentials stay revoked for a run of this name."""
        removed = self._removed | {run.run: max(int(time.time()), run.revoked + 1)}
        write_private(self._removals, json.dumps(removed))
        run.remove(self.private / "runs")
        self._write_accounts()

    def removed(self, run: str) -> int:
        """Unix seconds up to which credentials of removed runs of a name were issued; 0 if none.

        Raises:
            ConfigError: the file that records it cannot be read.
        """
        return self._removed.get(run, 0)

    @property
    def _removals(self) -> Path:
        return self.private / "removed.json"

    @property
    def _removed(self) -> dict[str, int]:
        try:
            return {str(name): int(at) for name, at in json.loads(self._removals.read_text()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            msg = (
                f"{self._removals} cannot be read: {error}; restore it, or the credentials of a removed run may be "
                "valid again in a later run of the same name"
            )
            raise ConfigError(msg) from error

    def _write_accounts(self) -> None:
        # Atomically: a server may read it at any time.
        write_private(self.files / "auth.conf", self.authority().server_config(self.runs.values()))

    def configure(self, settings: Settings, sync_interval: str) -> None:
        """Write the servers' configuration; its one secret is the password of cluster routes."""
        if settings.tls:
            self._write_certificate(settings)
        text = server_config(self.files, settings, sync_interval)
        write_private(self.files / "nats-server.conf", text)
        for name in settings.cluster:
            write_private(
                self.files / f"{name}.conf", text + settings.cluster_block(name, self.files, self._password())
            )
        options = {name: getattr(settings, name) for name in OF_SERVER}
        write_private(self.private / "server.json", json.dumps(options, default=lambda path: str(path.resolve())))

    @property
    def is_configured(self) -> bool:
        """Whether the options of the server are recorded."""
        return (self.private / "server.json").exists()

    def options(self) -> dict[str, Any]:
        """Return the options of the server, by name; raises ConfigError if unreadable."""
        path = self.private / "server.json"
        try:
            known: dict[str, Any] = json.loads(path.read_text())
            known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
            settings = Settings(**known)
            settings = replace(settings, store=None if settings.store is None else Path(settings.store))
            return {name: getattr(settings, name) for name in OF_SERVER}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            msg = f"{path} cannot be read: {error}; run `relax keys` for the first run of the server again"
            raise ConfigError(msg) from error

    def _password(self) -> str:
        """Return the password of the routes between the servers of a cluster; created once."""
        path = self.private / "route.json"
        if not path.exists():
            write_private(path, json.dumps(secrets.token_urlsafe(24)))
        return str(json.loads(path.read_text()))

    def _write_certificate(self, settings: Settings) -> None:
        """Write the authority if missing, and the certificate of the server."""
        ca_files = self.private / "ca.pem", self.private / "ca-key.pem"
        if not all(path.exists() for path in ca_files):
            certificates.new_authority(CA_DAYS).save(*ca_files)
        ca = certificates.CertificatePair.load(*ca_files)
        hosts = tuple(dict.fromkeys((*settings.hosts, *settings.cluster, *HOSTS, socket.gethostname())))
        own = certificates.issue(ca, "nats", SERVER_DAYS, hosts)
        own.save(self.files / "cert.pem", self.files / "key.pem")
        write_private(self.files / "ca.pem", ca.pem)

    def write_user_certificates(self, folder: Path, users: list[str], settings: Settings) -> None:
        """Write the authority's certificate beside credentials, and with mutual TLS users' own."""
        ca = certificates.CertificatePair.load(self.private / "ca.pem", self.private / "ca-key.pem")
        for name in users:
            write_private(folder / name / "ca.pem", ca.pem)
            if settings.mutual:
                own = certificates.issue(ca, name, settings.days or SERVER_DAYS)
                own.save(folder / name / "cert.pem", folder / name / "key.pem")


def options_given(settings: Settings) -> list[str]:
    """Return the names of the options of the server that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(Settings)}
    return [name for name in OF_SERVER if getattr(settings, name) != defaults[name]]


def server_config(folder: Path, settings: Settings, sync_interval: str) -> str:
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
        f"  max_file_store: {UNBOUNDED_BYTES}",
        f"  sync_interval: {quote(sync_interval)}",
        "}",
    ]
    if settings.tls:
        lines += ["tls {", tls_block(folder, mutual=settings.mutual), "}"]
    return "\n".join([*lines, *settings.lines(folder)]) + "\n"

"""Address of a broker and how to sign in to it."""

from __future__ import annotations

import json
import re
import ssl
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from broker.credentials import read_claims
from broker.errors import AddressError, BrokerError
from broker.files import write_private

CREDENTIALS_FILE = "nats.creds"


@dataclass(frozen=True, slots=True)
class Address:
    """URL of a broker, with the user or the credentials to sign in with."""

    url: str
    """`nats://host:port` or `tls://host:port`; the servers of a cluster are separated by commas."""
    user: str | None = None
    password: str | None = None
    credentials: str | None = None
    """Path of a NATS `.creds` file, or of a folder with one subfolder per user (see `for_user`). In a file of `save`
    it is relative to the file where it is below it, so that the folder of a run may be moved."""
    ca: str | None = None
    """Path of the CA certificate of a server with TLS; `ca.pem` beside the credentials by default."""
    server_name: str | None = None
    """Name in the server's certificate, if it is not the host of the URL."""

    def __repr__(self) -> str:
        return f"Address({self.url})"

    def for_user(self, user: str) -> Address:
        """Return this address with the credentials of one user.

        From a folder of credentials this selects `<user>/nats.creds`, or `nats.creds` if the folder has no
        subfolders. An address without such a folder is returned unchanged.

        Raises:
            AddressError: the folder has no credentials for the user.
        """
        if self.credentials is None or not Path(self.credentials).is_dir():
            return self
        folder = Path(self.credentials)
        for path in (folder / user / CREDENTIALS_FILE, folder / CREDENTIALS_FILE):
            if path.is_file():
                return replace(self, credentials=str(path))
        msg = f"{folder} holds no credentials of {user}: no {user}/{CREDENTIALS_FILE}; create it with `relax keys`"
        raise AddressError(msg)

    def inside(self, port: int) -> Address:
        """Return the address of a broker behind a forwarded port of the loopback interface."""
        first = urlsplit(self.url.partition(",")[0])
        return replace(self, url=f"{first.scheme}://127.0.0.1:{port}", server_name=first.hostname)

    def connect_options(self) -> dict[str, Any]:
        """Return the sign-in options of `nats.connect`; raises BrokerError for unreadable files."""
        options: dict[str, Any] = {"reconnect_time_wait": 0.1}
        if self.user:
            options |= {"user": self.user, "password": self.password}
        if self.credentials:
            options["user_credentials"] = self.credentials
            if prefix := read_claims(Path(self.credentials)).inbox_prefix:
                options["inbox_prefix"] = prefix.encode()
        if context := self.tls_context():
            options["tls"] = context
            if self.server_name:
                options["tls_hostname"] = self.server_name
        return options

    def tls_context(self) -> ssl.SSLContext | None:
        """TLS context for the server's CA; None without TLS.

        For mutual TLS it contains `cert.pem` and `key.pem` from the folder of the credentials.

        Raises:
            AddressError: the files are not certificates.
        """
        beside = Path(self.credentials).parent if self.credentials else None
        ca = Path(self.ca) if self.ca else beside / "ca.pem" if beside else None
        if ca is None or not (self.ca or ca.is_file()):
            return ssl.create_default_context() if self.url.startswith("tls://") else None
        try:
            context = ssl.create_default_context(cafile=ca)
            if beside is not None and (beside / "cert.pem").is_file():
                context.load_cert_chain(beside / "cert.pem", beside / "key.pem")
        except (OSError, ssl.SSLError) as error:
            msg = f"the certificates beside {ca} cannot be used: {error}; create new ones with `relax keys --tls`"
            raise AddressError(msg) from error
        return context

    def save(self, path: Path) -> None:
        """Write the address to a private file, atomically."""
        own = self.credentials
        if own is not None and Path(own).is_relative_to(path.parent):
            own = str(Path(own).relative_to(path.parent))
        write_private(path, json.dumps({**asdict(self), "credentials": own}))

    @classmethod
    def load(cls, path: Path) -> Address:
        """Read an address written by `save`; raises BrokerError if missing or malformed."""
        try:
            address = cls(**json.loads(path.read_text()))
            own = address.credentials
            return address if own is None else replace(address, credentials=str(path.parent / own))
        except FileNotFoundError as error:
            msg = f"no broker address in {path}: the run has not been up since its folder was made; start it first"
            raise BrokerError(msg) from error
        except (OSError, ValueError, TypeError) as error:
            msg = f"no broker address in {path}: {error}; is the run up?"
            raise BrokerError(msg) from error


def address_of(url: str, credentials: Path | None = None, ca: Path | None = None) -> Address:
    """Parse `nats://[user:password@]host:port`, or several of a cluster; raises AddressError."""
    own, authority = (None if path is None else str(path.resolve()) for path in (credentials, ca))
    servers, account = [], ""
    for server in re.split(r",(?=\w+://)", url):
        scheme, _, rest = server.partition("://")
        known, at, host = rest.rpartition("@")
        _check_server(scheme, host)
        servers.append(f"{scheme}://{host}" if at else server)
        account = known or account
    if not account:
        return Address(url, credentials=own, ca=authority)
    user, _, password = account.partition(":")
    return Address(",".join(servers), unquote(user), unquote(password), own, authority)


def _check_server(scheme: str, host: str) -> None:
    try:
        parts = urlsplit(f"//{host}")
        valid = scheme in ("nats", "tls") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        valid = False
    if not valid:
        msg = f"broker address {f'{scheme}://{host}' if host else scheme!r} is invalid; write nats://host:port"
        raise AddressError(msg)

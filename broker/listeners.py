"""Addresses of a keyed server: options of `relax keys`, and the server's configuration.

WebSocket, monitoring and routes listen on the host of `--listen`, which is this machine by default.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from broker.errors import ConfigError

ROUTE_PORT = 6222
MAX_PORT = (1 << 16) - 1
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of `relax keys`.

    Attributes:
        tls: create a certificate authority and a certificate of the server.
        mutual: create a certificate for each user too, which the server requires; needs `tls`.
        hosts: names or addresses of the server in its certificate, besides the default ones.
        days: days until the credentials expire; None for never.
        rotate: revoke all credentials of the run created before.
        replace: replace the credentials of another run.
        server: folder of the server, if another run's; the options of listeners, store and TLS are then the server's.
        listen: address that the server listens on.
        websocket: port for WebSocket clients.
        store: folder of the server's files; DIR/server/store if None.
        cluster: names of the servers of a cluster.
        http: unauthenticated monitoring port of the server.
        origins: pages that may use WebSocket; only those of the same host and port if empty.

    Raises:
        ConfigError: an option is no address, port, name, origin or number of days.
    """

    tls: bool = False
    mutual: bool = False
    hosts: tuple[str, ...] = ()
    days: float | None = None
    rotate: bool = False
    replace: bool = False
    server: Path | None = None
    listen: str = "127.0.0.1:4222"
    websocket: int | None = None
    store: Path | None = None
    cluster: tuple[str, ...] = ()
    http: int | None = None
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        host, port = self.host, self.listen.rpartition(":")[2]
        if not (_is_host(host.strip("[]")) and port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= MAX_PORT):
            msg = f"--listen {self.listen!r} is no HOST:PORT; write 127.0.0.1:4222, or 0.0.0.0:4222 for other machines"
            raise ConfigError(msg)
        for option, number in (("--websocket", self.websocket), ("--http", self.http)):
            if number is not None and not 0 < number <= MAX_PORT:
                msg = f"{option} {number} is no port; give a number from 1 to {MAX_PORT}"
                raise ConfigError(msg)
        for option, names in (("--host", self.hosts), ("--cluster", self.cluster)):
            if wrong := [name for name in names if not _is_host(name)]:
                msg = f"{option} {wrong[0]!r} is no host name or address; use letters, digits, '-' and '.'"
                raise ConfigError(msg)
        if wrong := [origin for origin in self.origins if not is_origin(origin)]:
            msg = f"--origin {wrong[0]!r} is no origin of a page; write https://HOST or https://HOST:PORT"
            raise ConfigError(msg)
        if self.days is not None and not (math.isfinite(self.days) and 0 < self.days <= 36500):  # noqa: PLR2004 a century
            msg = f"--days {self.days:g} is no time to expire; give a number of days above 0, or leave it out"
            raise ConfigError(msg)

    @property
    def host(self) -> str:
        """Host that the server listens on."""
        return self.listen.rpartition(":")[0]

    @property
    def is_loopback(self) -> bool:
        """Whether only clients of this machine reach the server."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"

    def lines(self, folder: Path) -> list[str]:
        """Return the server's configuration of monitoring and WebSocket, if requested."""
        lines = [] if self.http is None else [f"http: {json.dumps(f'{self.host}:{self.http}')}"]
        if self.websocket is not None:
            secure = ["  tls {", tls_block(folder, mutual=self.mutual), "  }"] if self.tls else ["  no_tls: true"]
            lines += websocket_block(f"{self.host}:{self.websocket}", self.origins, secure)
        return lines

    def cluster_block(self, name: str, folder: Path, password: str) -> str:
        """Return the block `cluster` of one server: the routes to all servers."""
        secure = f"  tls {{\n{tls_block(folder, mutual=True)}\n  }}\n" if self.tls else ""
        servers = self.cluster
        routes = "".join(f"    {json.dumps(f'nats-route://route:{password}@{to}:{ROUTE_PORT}')}\n" for to in servers)
        return (
            f"server_name: {json.dumps(name)}\n"
            "cluster {\n"
            "  name: relax\n"
            f"  listen: {json.dumps(f'{self.host}:{ROUTE_PORT}')}\n"
            f"  authorization {{ user: route, password: {json.dumps(password)} }}\n"
            f"  routes: [\n{routes}  ]\n"
            f"{secure}"
            "}\n"
        )


def websocket_block(listen: str, origins: Sequence[str], secure: Sequence[str] = ("  no_tls: true",)) -> list[str]:
    """Return the block `websocket` of a server; without `origins` only its own pages connect."""
    allowed = f"allowed_origins: {json.dumps(list(origins))}" if origins else "same_origin: true"
    return ["websocket {", f"  listen: {json.dumps(listen)}", f"  {allowed}", *secure, "}"]


def tls_block(folder: Path, *, mutual: bool) -> str:
    """Return the settings of a block `tls`."""
    quote = json.dumps
    return (
        f"  cert_file: {quote(str(folder / 'cert.pem'))}\n  key_file: {quote(str(folder / 'key.pem'))}\n"
        f"  ca_file: {quote(str(folder / 'ca.pem'))}\n  verify: {'true' if mutual else 'false'}"
    )


def _is_host(name: str) -> bool:
    if _HOST.fullmatch(name):
        return ".." not in name
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_origin(text: str) -> bool:
    """Whether a text is a page's origin: https://HOST or https://HOST:PORT."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    plain = f"{parts.scheme}://{shown}" + ("" if port is None else f":{port}")
    return parts.scheme in ("http", "https") and _is_host(host) and plain == text.lower()

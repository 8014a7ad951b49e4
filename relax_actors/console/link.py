"""Address and tokens of a run's console, kept in its folder.

The link of `relax up` stays valid when the console's process restarts, because the socket stays open. A port that was
free meanwhile may have been another user's, to whom a browser with the old link sent its token; so a socket that is
bound anew has new tokens.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Timer

from broker.files import write_private
from relax_actors.serving.listening import is_free, listen

HOST = "127.0.0.1"
LINK_VARIABLE = "RELAX_CONSOLE_LINK"
"""Environment variable in which `relax up` hands its link to its console; the file may be that of a later console."""
TOKEN_BYTES = 24
MAX_PROOF_BYTES = 256
PROOF_SECONDS = 10.0
"""Time for a console to prove that it holds the token; the first request starts its process."""


@dataclass(frozen=True, slots=True)
class Link:
    """How a browser reaches a console.

    Attributes:
        port: its port.
        observer: token that permits reading.
        operator: token that permits operations, too.
    """

    port: int
    observer: str
    operator: str

    def json(self) -> str:
        """Return what `parse_link` reads."""
        return json.dumps(asdict(self))

    def url(self, *, operator: bool = False, host: str = HOST) -> str:
        """Return the link to open. Its token is in the fragment, which a browser sends to no server."""
        return f"http://{host}:{self.port}/#token={self.operator if operator else self.observer}"


def link_file(folder: Path) -> Path:
    """File with the link of a run's console; only its user may read it."""
    return folder / "console.json"


def proof(token: str, port: int, nonce: str) -> str:
    """Return what only a holder of a token can answer to a nonce: the token itself is not sent.

    HMAC-SHA256 (RFC 2104) of port and nonce, as hexadecimal digits. With the port in it, an answer of the console
    at another port proves nothing.
    """
    return hmac.new(token.encode(), f"relax console {port} {nonce}".encode(), hashlib.sha256).hexdigest()


def is_console(link: Link) -> bool:
    """Whether the console of a link listens at its port, and not the process of another user.

    The process at the port has `PROOF_SECONDS` in all, however slowly it sends.
    """
    nonce, end = secrets.token_urlsafe(TOKEN_BYTES), time.monotonic() + PROOF_SECONDS
    connection = HTTPConnection(HOST, link.port, timeout=PROOF_SECONDS)
    try:
        connection.connect()
        with _ended_at(end, connection.sock):
            connection.request("GET", f"/proof?nonce={nonce}")
            answer = connection.getresponse()
            status, content = answer.status, answer.read(MAX_PROOF_BYTES)
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return status == HTTPStatus.OK and hmac.compare_digest(content, proof(link.observer, link.port, nonce).encode())


@contextmanager
def _ended_at(end: float, sock: socket.socket) -> Iterator[None]:
    """Shut a socket down at time `end` of `time.monotonic`; its own timeout would start again with each byte."""

    def shut_down() -> None:
        with suppress(OSError):  # the other side has reset the connection
            sock.shutdown(socket.SHUT_RDWR)

    timer = Timer(max(0.0, end - time.monotonic()), shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def write_redirect(folder: Path, url: str) -> str:
    """Write a page that only its user may read and that opens a link; return its address.

    All users of a machine see the arguments of a browser that is started, so the link must not be one of them.
    """
    path = folder.resolve() / "console.html"
    write_private(path, f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">')
    return path.as_uri()


def load_link(folder: Path) -> Link | None:
    """Return the link of a run's console as it was last used; None without one, or if its file is malformed."""
    try:
        return parse_link(link_file(folder).read_text())
    except (OSError, ValueError):
        return None


def parse_link(text: str) -> Link | None:
    """Return the link in a JSON object; None if it is malformed."""
    try:
        link = Link(**json.loads(text))
    except (ValueError, TypeError):
        return None
    tokens = (link.observer, link.operator)
    is_valid = isinstance(link.port, int) and all(
        isinstance(token, str) and len(token) > TOKEN_BYTES for token in tokens
    )
    return link if is_valid else None


def open_link(folder: Path, host: str = HOST, port: int | None = None) -> tuple[Link, socket.socket]:
    """Return a new link of a run's console, and the socket that listens for it; port 0 is a free one.

    Without a port, it is that of the last console of the run if it is free.

    Raises:
        ConfigError: the address cannot be bound.
    """
    known = load_link(folder)
    if port is None:
        port = known.port if known is not None and is_free(host, known.port) else 0
    listener = listen(host, port, "console", "give a free port with --port, or --port 0")
    link = Link(listener.getsockname()[1], secrets.token_urlsafe(TOKEN_BYTES), secrets.token_urlsafe(TOKEN_BYTES))
    write_private(link_file(folder), link.json())
    return link, listener

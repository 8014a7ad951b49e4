"""Address and tokens of a run's console, kept in its folder so that a link stays valid when the console restarts."""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from broker.files import write_private
from relax_actors.serving.listening import is_free, listen

HOST = "127.0.0.1"
TOKEN_BYTES = 24


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

    def url(self, *, operator: bool = False, host: str = HOST) -> str:
        """Return the link to open. Its token is in the fragment, which a browser sends to no server."""
        return f"http://{host}:{self.port}/#token={self.operator if operator else self.observer}"


def link_file(folder: Path) -> Path:
    """File with the link of a run's console; only its user may read it."""
    return folder / "console.json"


def load_link(folder: Path) -> Link | None:
    """Return the link of a run's console as it was last used; None without one, or if its file is malformed."""
    try:
        link = Link(**json.loads(link_file(folder).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    tokens = (link.observer, link.operator)
    is_valid = isinstance(link.port, int) and all(
        isinstance(token, str) and len(token) > TOKEN_BYTES for token in tokens
    )
    return link if is_valid else None


def open_link(folder: Path, host: str = HOST, port: int | None = None) -> tuple[Link, socket.socket]:
    """Return the link of a run's console, and the socket that listens for it.

    Args:
        folder: folder of the run.
        host: address to bind.
        port: port to bind; 0 for a free one, None for the port of the last console of the run if it is free.

    Raises:
        ConfigError: the address cannot be bound.
    """
    known = load_link(folder)
    if port is None:
        port = known.port if known is not None and is_free(host, known.port) else 0
    listener = listen(host, port, "console", "give a free port with --port, or --port 0")
    tokens = (known.observer, known.operator) if known is not None else _tokens()
    link = Link(listener.getsockname()[1], *tokens)
    write_private(link_file(folder), json.dumps(asdict(link)))
    return link, listener


def _tokens() -> tuple[str, str]:
    return secrets.token_urlsafe(TOKEN_BYTES), secrets.token_urlsafe(TOKEN_BYTES)

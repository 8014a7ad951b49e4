"""Sockets that listen for HTTP requests; imports no package of an extra."""

from __future__ import annotations

import socket

from relax_actors.errors import ConfigError


def listen(host: str, port: int, who: str = "server", remedy: str = "choose a free address") -> socket.socket:
    """Return a listening socket; port 0 is any free one. `who` and `remedy` are for the error.

    Raises:
        ConfigError: the address is in use, or is none of this machine.
    """
    server: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = socket.socket(family, kind, protocol)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(256)
    except OSError as error:
        if server is not None:
            server.close()
        msg = f"{who} cannot listen on {host}:{port}: {error}; {remedy}"
        raise ConfigError(msg) from error
    server.setblocking(False)
    return server


def is_free(host: str, port: int) -> bool:
    """Whether a port can be bound."""
    try:
        listen(host, port).close()
    except ConfigError:
        return False
    return True

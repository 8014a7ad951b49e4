"""WebSocket as a page opens it."""

from __future__ import annotations

import base64
import socket


def upgraded(port: int, origin: str | None) -> bool:
    """Whether a server takes a WebSocket of a page."""
    lines = [
        "GET / HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}",
        *([] if origin is None else [f"Origin: {origin}"]),
    ]
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        status = connection.recv(4096).split()[1]
    assert status in (b"101", b"403")
    return status == b"101"

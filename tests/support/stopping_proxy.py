"""A relay in front of the broker that stops passing on what a client sends, after some requests of a kind."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import replace

from broker.address import Address


class StoppingProxy:
    """Relays connections to a broker on threads; the request behind `passed` matching ones waits until `go_on`.

    Args:
        address: of the broker.
        pattern: bytes by which a request is counted.
        passed: requests that pass.

    Attributes:
        sent: what clients have sent so far, in order.
    """

    def __init__(self, address: Address, pattern: bytes, passed: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, _, port = address.url.removeprefix("nats://").rpartition(":")
        self._target = host, int(port)
        self.address = replace(address, url=f"nats://127.0.0.1:{self._listener.getsockname()[1]}")
        self._pattern, self._left = pattern, passed
        self._open = threading.Event()
        self.sent = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def go_on(self) -> None:
        """Pass on everything from now on."""
        self._open.set()

    def close(self) -> None:
        """Accept no further connection, and end waiting ones."""
        self._open.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._target)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._relay, args=(*ends, ends[0] is client), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:  # noqa: FBT001
        with suppress(OSError), source, sink:
            while data := source.recv(1 << 16):
                if counts:
                    self.sent += data
                    self._left -= data.count(self._pattern)
                    if self._left < 0:
                        self._open.wait()
                sink.sendall(data)

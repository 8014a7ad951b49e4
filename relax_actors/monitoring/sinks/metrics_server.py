"""HTTP server of one page, `/metrics`, which no client can keep busy or fill.

A request has `MAX_SECONDS` and `MAX_REQUEST` bytes for everything, and at most `MAX_CLIENTS` are served at once; the
server closes further connections. On a loopback address it answers only requests for a loopback name: a web page can
have its own name resolve to 127.0.0.1, and would then read the answer.
"""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from relax_actors.config.gateway import is_loopback
from relax_actors.errors import ConfigError

MAX_SECONDS, MAX_REQUEST, MAX_CLIENTS = 5.0, 16 << 10, 16
PUBLIC = "public:"


class MetricsServer(ThreadingHTTPServer):
    """Server of `/metrics`, which `page` returns, in threads of its own.

    The target is `port`, `host:port` or `public:host:port`; 127.0.0.1 if no host is given.

    Raises:
        ConfigError: the address is invalid or in use, or is no loopback address and not marked as public.
    """

    daemon_threads = True
    request_queue_size = 2 * MAX_CLIENTS

    def __init__(self, target: str, page: Callable[[], bytes]) -> None:
        self.page = page
        self._free = threading.BoundedSemaphore(MAX_CLIENTS)
        host, port, self.is_public = _parsed(target)
        try:
            (self.address_family, *_, address), *_ = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            if not self.is_public and not is_loopback(str(address[0])):
                msg = (
                    f"--sink prometheus={target}: {host} is no loopback address, and everybody who reaches it may read "
                    f"the metrics; write prometheus={PUBLIC}{target} if that is wanted, or prometheus={port}"
                )
                raise ConfigError(msg)
            super().__init__((str(address[0]), port), _Handler)
        except (OSError, ValueError, OverflowError) as error:
            msg = f"--sink prometheus={target}: {error}; give a free port, or host:port"
            raise ConfigError(msg) from error
        threading.Thread(target=self.serve_forever, args=(0.1,), name="prometheus", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, or close it if `MAX_CLIENTS` are being served."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that went away; a traceback on the terminal would be its work."""

    def answers(self, host: str | None) -> bool:
        """Whether a request with this header `Host` is answered."""
        if self.is_public or host is None:
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return is_loopback(name)


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    server_version, sys_version = "relax", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Request(self.connection))

    def do_GET(self) -> None:
        if not self.server.answers(self.headers["Host"]):
            self._send(421, b"the header Host names another server\n")
        elif self.path.split("?")[0] == "/metrics":
            self._send(200, self.server.page())
        else:
            self._send(404, b"see /metrics\n")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.connection.settimeout(MAX_SECONDS)
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the library's name
        """Log nothing: requests come every few seconds."""


class _Request(io.RawIOBase):
    """Bytes of one request, up to its size and its deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left, self._end = MAX_REQUEST, time.monotonic() + MAX_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read some bytes; raises TimeoutError, and closes, after `MAX_SECONDS` or `MAX_REQUEST`."""
        if self._left <= 0:
            msg = f"more than {MAX_REQUEST} bytes"
            raise TimeoutError(msg)
        self._connection.settimeout(max(1e-3, self._end - time.monotonic()))
        count = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= count
        return count


def _parsed(target: str) -> tuple[str, int, bool]:
    """Return host, port and whether the target is marked as public."""
    host, _, port = target.removeprefix(PUBLIC).rpartition(":")
    if not port.isdecimal() or not port.isascii() or int(port[:6]) >= 1 << 16:
        msg = f"--sink prometheus={target}: {port!r} is no port number; write prometheus=9108, or host:port"
        raise ConfigError(msg)
    return host.strip("[]") or "127.0.0.1", int(port), target.startswith(PUBLIC)

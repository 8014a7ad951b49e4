"""Connection of a rank on another node to the actor that gathers the group: how it is opened, kept and watched."""

from __future__ import annotations

import hmac
import select
import socket
import struct
import time

_HELLO = struct.Struct("<64sI")
_LOST = select.POLLRDHUP | select.POLLHUP | select.POLLERR
HELLO_SECONDS = 2.0
IDLE_SECONDS, PROBES = 5, 3
"""A peer whose machine is gone is noticed after `IDLE_SECONDS * (PROBES + 1)`."""


def send_token(connection: socket.socket, token: str, rank: int) -> None:
    """Prove to the gathering actor that this rank was invited."""
    connection.sendall(_HELLO.pack(token.encode(), rank))


def receive_token(connection: socket.socket, token: str) -> int | None:
    """Return the number of the rank that connected; None for anybody who was not invited, or takes too long."""
    end, data = time.monotonic() + HELLO_SECONDS, b""
    try:
        while len(data) < _HELLO.size:
            connection.settimeout(max(0.001, end - time.monotonic()))
            if not (part := connection.recv(_HELLO.size - len(data))):
                return None
            data += part
    except OSError:
        return None
    given, rank = _HELLO.unpack(data)
    return int(rank) if hmac.compare_digest(given, token.encode()) else None


def keep(connection: socket.socket) -> None:
    """Make a connection that waits without limit, and ends when the peer's machine no longer answers."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, IDLE_SECONDS * (PROBES + 1) * 1000)


def wait_for_end(connection: socket.socket, process: int | None = None) -> bool:
    """Wait until the peer is gone or a process has ended; return whether the peer was gone first.

    The connection is not read from; `process` is a descriptor of `os.pidfd_open`.
    """
    poll = select.poll()
    poll.register(connection, _LOST)
    if process is not None:
        poll.register(process, select.POLLIN)
    return process not in [descriptor for descriptor, _ in poll.poll()]


def wait_for_exit(process: int, seconds: float) -> None:
    """Wait some seconds at most for the end of a process, by a descriptor of `os.pidfd_open`."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll(seconds * 1000)

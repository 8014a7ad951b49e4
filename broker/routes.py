"""IPv4 addresses of this machine: by which it reaches another, and which interface has one."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

from broker.errors import BrokerError

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9


def local_address(host: str) -> str:
    """Return the local address towards an IPv4 host, without sending; raises BrokerError."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError as error:
        msg = f"this machine has no IPv4 route to {host}: {error}; use a broker with an IPv4 address in broker.url"
        raise BrokerError(msg) from error


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address; empty if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""

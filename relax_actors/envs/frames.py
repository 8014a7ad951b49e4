"""Frames between an actor and a session's process: 4 bytes of length, then a cell."""

from __future__ import annotations

import asyncio
import socket
import struct

from relax_actors.errors import CodecError

_LENGTH = struct.Struct("!I")


def frame(data: bytes) -> bytes:
    """Return a frame with the data."""
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader, most: int) -> bytes:
    """Read a frame; raises asyncio.IncompleteReadError or CodecError (above `most` bytes)."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > most:
        msg = f"frame of {size} bytes is over the limit of {most}"
        raise CodecError(msg)
    return await reader.readexactly(size)


async def open_socket(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Wrap a connected socket in streams."""
    sock.setblocking(False)
    return await asyncio.open_connection(sock=sock)

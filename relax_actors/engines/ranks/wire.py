"""Messages between engine and ranks: plain data and arrays in msgpack, never pickle."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

_ARRAY = 1
_LENGTH = struct.Struct("<Q")


def encode(message: Any) -> bytes:
    """Encode a message; raises TypeError if a value is neither plain data nor an array."""
    data: bytes = msgpack.packb(message, default=_pack, use_bin_type=True)
    return data


def decode(data: bytes) -> Any:
    """Decode a message; tuples come back as lists."""
    return msgpack.unpackb(data, ext_hook=_unpack, raw=False, strict_map_key=False, max_ext_len=len(data) or 1)


class Channel:
    """One end of a stream socket that carries length-prefixed messages."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, message: Any) -> None:
        """Send a message; raises EOFError if the peer has closed the connection."""
        data = encode(message)
        try:
            self.connection.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise EOFError(str(error)) from error

    def receive(self) -> Any:
        """Wait for the next message; raises EOFError if the peer has closed, maybe after a part of a message."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return decode(self._read(length))

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self.connection.recv_into(view)
            except OSError as error:
                raise EOFError(str(error)) from error
            if count == 0:
                msg = "the peer has closed the connection"
                raise EOFError(msg)
            view = view[count:]
        return bytes(data)


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        header = msgpack.packb([value.dtype.str, list(value.shape)])
        return msgpack.ExtType(_ARRAY, header + np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    msg = f"a value of type {type(value).__name__} cannot be sent to a rank; send plain data or NumPy arrays"
    raise TypeError(msg)


def _unpack(code: int, data: bytes) -> NDArray[Any]:
    if code != _ARRAY:
        msg = f"unknown msgpack extension type {code}; engine and ranks must run the same version"
        raise ValueError(msg)
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    dtype, shape = unpacker.unpack()
    return np.frombuffer(data, np.dtype(dtype), offset=unpacker.tell()).reshape(shape)

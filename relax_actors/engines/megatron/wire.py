"""Messages between an engine and its ranks, and among these: plain data and arrays in msgpack, never pickled."""

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
    """A message as bytes.

    Raises:
        TypeError: it holds something that is neither plain data nor an array.
    """
    data: bytes = msgpack.packb(message, default=_packed, use_bin_type=True)
    return data


def decode(data: bytes) -> Any:
    """The message of such bytes; tuples come as lists."""
    return msgpack.unpackb(data, ext_hook=_unpacked, raw=False, strict_map_key=False, max_ext_len=len(data) or 1)


class Channel:
    """One end of a stream socket, on which each message has its length before it.

    A message is whole or the other end is gone: EOFError.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            EOFError: the other end is gone.
        """
        data = encode(message)
        try:
            self.connection.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise EOFError(str(error)) from error

    def receive(self) -> Any:
        """The next message, waited for.

        Raises:
            EOFError: the other end is gone.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return decode(self._exactly(length))

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self.connection.recv_into(view)
            except OSError as error:
                raise EOFError(str(error)) from error
            if count == 0:
                msg = "the other end has closed the connection"
                raise EOFError(msg)
            view = view[count:]
        return bytes(data)


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        header = msgpack.packb([value.dtype.str, list(value.shape)])
        return msgpack.ExtType(_ARRAY, header + np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    msg = f"a {type(value).__name__} cannot be sent"
    raise TypeError(msg)


def _unpacked(code: int, data: bytes) -> NDArray[Any]:
    if code != _ARRAY:
        msg = f"extension type {code} is not known"
        raise ValueError(msg)
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    dtype, shape = unpacker.unpack()
    return np.frombuffer(data, np.dtype(dtype), offset=unpacker.tell()).reshape(shape)

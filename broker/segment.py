"""Segment: a safetensors file with the large arrays of cells, and references to them.

Arrays are aligned to 64 bytes, so that a mapped array can be used without a copy. The header has a fixed size, so that
the offset of an array is known when it is placed, before the others are.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from broker.codec import Array, dtype_name
from broker.errors import StoreError
from broker.fields import TensorRef

Bytes = NDArray[np.uint8]
INLINE_BYTES = 8 << 10
"""Largest array that stays inline in its cell, in bytes."""
SEGMENT_BYTES = 64 << 20
"""Size from which no further array is added to a segment, in bytes."""
_ALIGN = 64
_HEADER_BYTES = 4096 - 8
_DATA_OFFSET = 8 + _HEADER_BYTES
_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}


def checksum(data: Any) -> str:
    """Return the xxh3-128 of a buffer in hex."""
    return xxhash.xxh3_128_hexdigest(data)


class _Segment:
    """Arrays of one segment, and its header so far."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.size = 0
        self._header = ["{"]
        self._header_size = 1
        self._parts: list[Any] = []
        self._count = 0

    def add(self, array: Array, data: Bytes) -> int | None:
        """Add an array's bytes; return their offset in the file, None if the segment is full."""
        name, shape, end = self._count, ",".join(map(str, array.shape)), self.size + array.nbytes
        kind = _SAFETENSORS[dtype_name(array.dtype)]
        entry = f'"{name}":{{"dtype":"{kind}","shape":[{shape}],"data_offsets":[{self.size},{end}]}},'
        if pad := -array.nbytes % _ALIGN:  # the format does not allow gaps between tensors
            entry += f'"pad{name}":{{"dtype":"U8","shape":[{pad}],"data_offsets":[{end},{end + pad}]}},'
        if self._parts and (self._header_size + len(entry) > _HEADER_BYTES or self.size >= SEGMENT_BYTES):
            return None
        offset = _DATA_OFFSET + self.size
        self._header.append(entry)
        self._header_size += len(entry)
        self._parts.append(data)
        if pad:
            self._parts.append(bytes(pad))
        self._count += 1
        self.size = end + pad
        return offset

    def parts(self) -> list[Any]:
        """Return the content of the file, as buffers."""
        header = "".join(self._header).removesuffix(",") + "}"
        return [_HEADER_BYTES.to_bytes(8, "little") + header.encode().ljust(_HEADER_BYTES), *self._parts]


class SegmentWriter:
    """Collects large arrays of cells; `close` writes them as one segment.

    A full segment is followed by another. Pass `place` to `broker.codec.encode`.

    Args:
        next_uri: returns an unused path for a segment in the store.
        write: writes buffers one after the other to a path in the store, atomically.
        inline_bytes: size up to which an array stays in its cell.
    """

    def __init__(
        self, next_uri: Callable[[], str], write: Callable[[str, list[Any]], None], inline_bytes: int = INLINE_BYTES
    ) -> None:
        self._next_uri = next_uri
        self._inline_bytes = inline_bytes
        self._write = write
        self._segments: list[_Segment] = []

    def place(self, array: Array) -> TensorRef | None:
        """Add an array to a segment and return its reference; None if it stays inline."""
        if array.nbytes <= self._inline_bytes:
            return None
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        array = np.ascontiguousarray(array)
        data = array.reshape(-1).view(np.uint8)
        offset = self._segments[-1].add(array, data) if self._segments else None
        if offset is None:
            self._segments.append(_Segment(self._next_uri()))
            offset = typing.cast("int", self._segments[-1].add(array, data))
        uri, kind = self._segments[-1].uri, dtype_name(array.dtype)
        return TensorRef(uri, offset, array.nbytes, kind, array.shape, checksum(data))

    def close(self) -> bool:
        """Write the segments, and return whether there were any. Raises StoreFullError."""
        for segment in self._segments:
            self._write(segment.uri, segment.parts())
        return bool(self._segments)


def array_view(segment: Bytes, reference: TensorRef) -> Array:
    """Return the array of a reference as a view of its segment, after verifying its checksum.

    Raises:
        StoreError: the segment is too short, corrupt, or does not hold an array of the reference's shape.
    """
    data = segment[reference.offset : reference.offset + reference.nbytes]
    if len(data) != reference.nbytes:
        msg = f"segment {reference.uri} holds {len(segment)} bytes, too few for {reference}"
        raise StoreError(msg)
    if checksum(data) != reference.xxh3_128:
        msg = f"segment {reference.uri} is corrupt: its checksum is not {reference.xxh3_128}"
        raise StoreError(msg)
    try:
        array: Array = data.view(reference.dtype).reshape(reference.shape)
    except (ValueError, OverflowError) as error:
        msg = f"segment {reference.uri} does not hold an array of shape {reference.shape}: {error}"
        raise StoreError(msg) from error
    return array

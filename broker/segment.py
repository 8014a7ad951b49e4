"""Segment of one cell: a safetensors file with its large arrays, and the references to them.

Arrays are aligned to 64 bytes, so that a mapped array can be used without a copy. The header has a fixed size, so that
the offset of an array is known when it is placed, before the others are.
"""

from __future__ import annotations

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


class SegmentWriter:
    """Collects the large arrays of one cell; `close` writes them as one segment.

    Pass `place` to `broker.codec.encode`.

    Args:
        uri: path of the segment in the store.
        write: writes buffers one after the other to a path in the store, atomically.
    """

    def __init__(self, uri: str, write: Callable[[str, list[Any]], None]) -> None:
        self._uri = uri
        self._write = write
        self._arrays: list[Array] = []
        self._size = 0

    def place(self, array: Array) -> TensorRef | None:
        """Add an array to the segment and return its reference; None if it stays inline."""
        if array.nbytes <= INLINE_BYTES:
            return None
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        data = np.ascontiguousarray(array)
        offset = _DATA_OFFSET + self._size
        self._arrays.append(data)
        self._size += -(-data.nbytes // _ALIGN) * _ALIGN
        sum_ = checksum(data.reshape(-1).view(np.uint8))
        return TensorRef(self._uri, offset, data.nbytes, dtype_name(data.dtype), data.shape, sum_)

    def close(self) -> bool:
        """Write the segment; False if no array was placed and nothing was written.

        Raises:
            StoreError: the cell has more arrays than the segment's header can describe.
            StoreFullError: no space is left.
        """
        if not self._arrays:
            return False
        self._write(self._uri, self._parts())
        return True

    def _parts(self) -> list[Any]:
        entries: list[str] = []
        parts: list[Any] = []
        offset = 0
        for i, array in enumerate(self._arrays):
            shape = ",".join(map(str, array.shape))
            ends = f"[{offset},{offset + array.nbytes}]"
            kind = _SAFETENSORS[dtype_name(array.dtype)]
            entries.append(f'"{i}":{{"dtype":"{kind}","shape":[{shape}],"data_offsets":{ends}}}')
            offset += array.nbytes
            parts.append(array.reshape(-1).view(np.uint8).data)
            if pad := -array.nbytes % _ALIGN:  # the format does not allow gaps between tensors
                entries.append(f'"pad{i}":{{"dtype":"U8","shape":[{pad}],"data_offsets":[{offset},{offset + pad}]}}')
                offset += pad
                parts.append(bytes(pad))
        header = ("{" + ",".join(entries) + "}").encode()
        if len(header) > _HEADER_BYTES:
            msg = (
                f"segment {self._uri} has {len(self._arrays)} arrays, more than its header can describe; "
                "concatenate small arrays"
            )
            raise StoreError(msg)
        return [_HEADER_BYTES.to_bytes(8, "little") + header.ljust(_HEADER_BYTES), *parts]


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

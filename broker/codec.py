"""Encoding of cells: msgpack with a schema version, decoded strictly into dataclasses.

A cell is the array `[schema, type, author, fields]`. `fields` maps field names to plain data, arrays (extension type 1)
or references to arrays in the store: those of extension type 2 are read with the cell, those of type 3 stay references.
Fields with their default value are omitted. Decoding executes no code. Unknown fields, missing fields without a default
and values of a wrong type are errors, and sizes are limited.

A numbered cell, such as `batch.12`, has a fifth element, a checksum over its subject and all preceding bytes. Such
a cell controls the run and cannot be regenerated like a row, so an altered or misplaced one must be refused.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from broker.errors import CodecError
from broker.fields import Decoder, TensorRef, check_plain, decoder_of, plain
from broker.items import check_items
from broker.schema import SCHEMA

T = TypeVar("T")
MAX_CELL_BYTES = 4 << 20
MAX_ITEMS = 1 << 17
"""Most items of a cell: values, keys, lists and maps at every depth."""
MAX_ARRAYS = 1 << 14
"""Most arrays of a cell."""
MAX_ARRAY_BYTES = 16 << 30
"""Largest array, and most bytes of all arrays in the store that a cell refers to."""
MAX_DIMENSIONS = 8
MAX_REFERENCES = 256
_UNCHECKED_BYTES = 64 << 10
"""Cells up to this size are decoded without counting their items first: they take a few MiB at worst."""
_MAX_HEAD_BYTES, _MAX_REFERENCE_BYTES = 512, 8 << 10
_ARRAY, _REFERENCE, _KEPT = 1, 2, 3
_CELL_ITEMS, _ARRAY_ITEMS = 4, 3
"""Items of a cell without a checksum, and of an array in it."""
_CHECKSUM_BYTES = 16
_BUFFER_BYTES = 4 << 10
"""First size of the buffer that a cell is packed into, which grows. msgpack's default of 256 KiB is mapped and unmapped
by the kernel for every cell and every reference."""
_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_ITEM_BYTES = {name: np.dtype(name).itemsize for name in _DTYPES}

Array = NDArray[Any]


Resolver = Callable[[TensorRef], Array]
Place = Callable[[Array], TensorRef | None]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A cell with undecoded fields: its type name and its author, `<role>.<n>#<incarnation>`."""

    type: str
    author: str
    fields: dict[str, Any]


def _checksum(subject: str, before: bytes) -> bytes:
    return xxhash.xxh3_128_digest(subject.encode() + b"\0" + before)


def encode(value: Any, author: str, place: Place | None = None, *, subject: str | None = None) -> bytes:
    """Encode a dataclass, or plain data (as type `value`), as a cell.

    Args:
        value: a dataclass instance, or None, bool, int, float, str, bytes, list, tuple, dict with
            string keys, a NumPy array or scalar, nested as needed.
        author: the writer, `<role>.<n>#<incarnation>`.
        place: stores an array and returns its reference, or returns None to encode it inline.
        subject: subject of the cell; adds the checksum that binds the cell to it.

    Raises:
        CodecError: a value cannot be encoded, or the cell is larger than `MAX_CELL_BYTES`.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name, fields = type(value).__name__, _plain_fields(value)
    else:
        name, fields = "value", {"value": value}

    arrays = 0

    def default(item: Any) -> Any:
        nonlocal arrays
        if isinstance(item, np.ndarray):
            arrays += 1
            if arrays > MAX_ARRAYS:
                raise _too_many_arrays()
            return _encode_array(item, place)
        return _encode_item(item)

    check_plain(fields, name)
    try:
        data = _pack([SCHEMA, name, author, fields], default, subject)
    except (ValueError, OverflowError, TypeError) as error:
        msg = f"{name} cannot be encoded: {error}"
        raise CodecError(msg) from error
    if len(data) > MAX_CELL_BYTES:
        msg = f"{name} has {len(data)} bytes, a cell at most {MAX_CELL_BYTES}; pass large data as arrays"
        raise CodecError(msg)
    if len(data) > _UNCHECKED_BYTES:
        check_items(data, MAX_ITEMS)
    return data


def _encode_item(item: Any) -> Any:
    """Return what msgpack encodes in place of a value that is neither plain data nor an array."""
    if isinstance(item, np.generic):
        return item.item()
    if isinstance(item, TensorRef):
        return msgpack.ExtType(_KEPT, _packed(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    msg = f"a {type(item).__name__} cannot be encoded in a cell; use plain data, arrays or dataclasses"
    raise CodecError(msg)


def _pack(cell: list[Any], default: Callable[[Any], Any], subject: str | None) -> bytes:
    if subject is None:
        return typing.cast("bytes", msgpack.packb(cell, default=default, use_bin_type=True, buf_size=_BUFFER_BYTES))
    cell = [*cell, bytes(_CHECKSUM_BYTES)]
    before: bytes = msgpack.packb(cell, default=default, use_bin_type=True, buf_size=_BUFFER_BYTES)
    before = before[:-_CHECKSUM_BYTES]
    return before + _checksum(subject, before)


def open_envelope(data: bytes, resolve: Resolver | None = None, *, subject: str | None = None) -> Envelope:
    """Decode the envelope of a cell, without decoding its fields into a type.

    Args:
        data: the cell.
        resolve: reads the array of a reference from the store; None to keep references as `TensorRef`.
        subject: subject of a numbered cell, to verify its checksum first.

    Raises:
        CodecError: the data is not a cell, has another schema, is too large or too deep, or its checksum is wrong.
        StoreError: `resolve` cannot read an array.
    """
    if len(data) > MAX_CELL_BYTES:
        msg = f"cell of {len(data)} bytes is over the limit of {MAX_CELL_BYTES}"
        raise CodecError(msg)
    if subject is not None:
        verify(data, subject)
    if len(data) > _UNCHECKED_BYTES:
        check_items(data, MAX_ITEMS)
    try:
        cell = msgpack.unpackb(data, ext_hook=_extensions(resolve), strict_map_key=True, raw=False)
    except CodecError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        msg = f"not msgpack: {str(error)[:200]}"
        raise CodecError(msg) from error
    # Not a `match`: class patterns of built-in types take a microsecond each.
    if type(cell) is list and len(cell) in (_CELL_ITEMS, _CELL_ITEMS + 1):
        schema, name, author, fields = cell[:_CELL_ITEMS]
        well_formed = type(schema) is int and type(name) is str and type(author) is str and type(fields) is dict
        if well_formed and (len(cell) == _CELL_ITEMS or type(cell[-1]) is bytes):
            if schema != SCHEMA:
                msg = f"cell has schema {schema}, this version reads schema {SCHEMA}; run both ends at one version"
                raise CodecError(msg)
            check_plain(fields, name[:80])
            return Envelope(name, author, fields)
    msg = "not a cell: expected [schema, type, author, fields]"
    raise CodecError(msg)


def verify(data: bytes, subject: str) -> None:
    """Check that the owner of a numbered cell wrote it.

    Raises:
        CodecError: its checksum does not match its subject and content.
    """
    if data[-_CHECKSUM_BYTES:] != _checksum(subject, data[:-_CHECKSUM_BYTES]):
        msg = f"the checksum of cell {subject} does not match its subject and content: its owner did not write it"
        raise CodecError(msg)


def _extensions(resolve: Resolver | None) -> Callable[[int, bytes], Any]:
    """Return the decoder of the extension types of one cell."""
    arrays = references = referenced = 0

    def decode_extension(code: int, payload: bytes) -> Any:
        nonlocal arrays, references, referenced
        arrays += 1
        if arrays > MAX_ARRAYS:
            raise _too_many_arrays()
        if code == _ARRAY:
            return _decode_array(payload)
        if code not in (_REFERENCE, _KEPT):
            msg = f"unknown extension type {code}"
            raise CodecError(msg)
        references += 1
        if references > MAX_REFERENCES:
            msg = f"a cell refers to at most {MAX_REFERENCES} arrays in the store"
            raise CodecError(msg)
        reference = _decode_reference(payload)
        referenced += reference.nbytes
        if referenced > MAX_ARRAY_BYTES:
            msg = f"a cell refers to at most {MAX_ARRAY_BYTES} bytes in the store"
            raise CodecError(msg)
        return reference if resolve is None or code == _KEPT else resolve(reference)

    return decode_extension


def decode_fields(envelope: Envelope, expected: type[T]) -> T:
    """Decode the fields of an envelope strictly into a dataclass; raises CodecError."""
    if envelope.type != expected.__name__:
        msg = f"cell holds a {envelope.type[:80]}, expected a {expected.__name__}"
        raise CodecError(msg)
    decoder: Decoder = decoder_of(typing.cast("Any", expected))
    return typing.cast("T", decoder(envelope.fields, expected.__name__))


def decode(data: bytes, expected: type[T], resolve: Resolver | None = None) -> T:
    """Decode a cell into the dataclass `expected`; see `open_envelope` and `decode_fields`."""
    return decode_fields(open_envelope(data, resolve), expected)


def plain_value(envelope: Envelope) -> Any:
    """Return the payload of a cell of type `value`; raises CodecError for other cells."""
    if envelope.type != "value" or set(envelope.fields) != {"value"}:
        msg = f"cell holds a {envelope.type[:80]}, expected plain data"
        raise CodecError(msg)
    return plain(envelope.fields["value"], "value")


def _plain_fields(value: Any) -> dict[str, Any]:
    """Return the fields by name, without fields that have their default value."""
    required, optional = _fields_of(typing.cast("Any", type(value)))
    fields = {name: getattr(value, name) for name in required}
    for name, default in optional:
        item = getattr(value, name)
        if item is not default and (isinstance(item, np.ndarray) or item != default):
            fields[name] = item
    return fields


@cache
def _fields_of(kind: Any) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """Return the names of required fields, and the other fields with their defaults."""
    required, optional = [], []
    for field in dataclasses.fields(kind):
        if field.default_factory is not dataclasses.MISSING:
            optional.append((field.name, field.default_factory()))
        elif field.default is not dataclasses.MISSING:
            optional.append((field.name, field.default))
        else:
            required.append(field.name)
    return tuple(required), tuple(optional)


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return `dtype.name`, cached because NumPy computes it at every access."""
    return dtype.name


def _packed(reference: TensorRef) -> bytes:
    fields = (reference.uri, reference.offset, reference.nbytes, reference.dtype, reference.shape, reference.xxh3_128)
    packed: bytes = msgpack.packb(fields, buf_size=_BUFFER_BYTES)
    return packed


def _encode_array(array: Array, place: Place | None) -> msgpack.ExtType:
    if dtype_name(array.dtype) not in _ITEM_BYTES:
        msg = f"an array of dtype {array.dtype} cannot be encoded; use one of {', '.join(sorted(_DTYPES))}"
        raise CodecError(msg)
    if array.ndim > MAX_DIMENSIONS:
        msg = f"an array of {array.ndim} dimensions cannot be encoded; the limit is {MAX_DIMENSIONS}"
        raise CodecError(msg)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    reference = place(array) if place else None
    if reference is not None:
        return msgpack.ExtType(_REFERENCE, _packed(reference))
    # np.ascontiguousarray turns shape () into (1,), so the shape is taken from the original array.
    content = [dtype_name(array.dtype), list(array.shape), np.ascontiguousarray(array).tobytes()]
    body = msgpack.packb(content, buf_size=_BUFFER_BYTES)
    return msgpack.ExtType(_ARRAY, body)


def _sizes(dtype: Any, shape: Any) -> tuple[str, tuple[int, ...], int]:
    nbytes = _ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if nbytes is None:
        msg = f"array of dtype {str(dtype)[:80]!r} is not allowed"
        raise CodecError(msg)
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise _bad_shape(shape)
    for size in shape:
        if type(size) is not int or size < 0:
            raise _bad_shape(shape)
        nbytes *= size
    if nbytes > MAX_ARRAY_BYTES:
        msg = f"array of {nbytes} bytes is over the limit"
        raise CodecError(msg)
    return dtype, tuple(shape), nbytes


def _too_many_arrays() -> CodecError:
    return CodecError(f"a cell has more than {MAX_ARRAYS} arrays; join them")


def _bad_shape(shape: Any) -> CodecError:
    return CodecError(f"array shape {str(shape)[:80]} is not a list of at most {MAX_DIMENSIONS} sizes")


def _decode_array(payload: bytes) -> Array:
    if len(payload) > _MAX_HEAD_BYTES:
        check_items(payload, MAX_DIMENSIONS + 4)
    packed = msgpack.unpackb(payload, strict_map_key=True)
    if type(packed) is list and len(packed) == _ARRAY_ITEMS and type(packed[2]) is bytes:
        name, sizes, nbytes = _sizes(packed[0], packed[1])
        if nbytes != len(packed[2]):
            msg = f"array {name}{list(sizes)} needs {nbytes} bytes, the cell has {len(packed[2])}"
            raise CodecError(msg)
        return np.frombuffer(packed[2], dtype=name).reshape(sizes)
    msg = "malformed array"
    raise CodecError(msg)


def _decode_reference(payload: bytes) -> TensorRef:
    if len(payload) > _MAX_REFERENCE_BYTES:
        msg = f"tensor reference of {len(payload)} bytes is over the limit of {_MAX_REFERENCE_BYTES}"
        raise CodecError(msg)
    packed = msgpack.unpackb(payload, strict_map_key=True)
    if type(packed) is list and len(packed) == len(TensorRef.__slots__):
        uri, offset, nbytes, dtype, shape, digest = packed
        if type(uri) is str and type(offset) is int and offset >= 0 and type(digest) is str:
            name, sizes, expected = _sizes(dtype, shape)
            if expected == nbytes:
                return TensorRef(uri, offset, nbytes, name, sizes, digest)
    msg = "malformed tensor reference"
    raise CodecError(msg)

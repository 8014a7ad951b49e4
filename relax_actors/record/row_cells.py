"""Cells of one row, from the table or from the record, read in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from broker.codec import Envelope, Resolver, decode_fields, open_envelope
from broker.fields import TensorRef
from broker.store import Store
from broker.subjects import RowId
from relax_actors.errors import CodecError, RecordError, StoreError
from relax_actors.record.frames import Frame, read_body

T = TypeVar("T")
NOT_KEPT = frozenset({"media"})
"""Columns that are not kept: features of media, which are as large as they are, and follow from the media."""
_EXPERTS = frozenset({"experts", "prompt_experts", "routed_experts"})
"""Fields that are not kept where they are in the store: the experts of every token and layer."""


@dataclass(frozen=True, slots=True)
class RowCell:
    """A cell of a row.

    Attributes:
        field: its column, or `turns.<attempt>.<k>`.
        sequence: stream sequence of its message.
        stored: Unix time in seconds at which the broker stored it; 0 if unknown.
        data: the encoded cell.
    """

    field: str
    sequence: int
    stored: float
    data: bytes


class RowCells:
    """Cells of one row, with the arrays that they refer to.

    Args:
        row: id of the row.
        cells: its cells.
        resolve: reads the arrays in the store; None if they are not on this machine.
        why: names of the rules of [record] that keep it; empty for a row of the table.
    """

    def __init__(
        self, row: RowId, cells: Iterable[RowCell], resolve: Resolver | None = None, why: Sequence[str] = ()
    ) -> None:
        self.row, self.why = row, tuple(why)
        self.cells = {cell.field: cell for cell in sorted(cells, key=lambda cell: cell.sequence)}
        self._resolve = resolve

    def envelope(self, field: str) -> Envelope | None:
        """Return a cell without its arrays in the store; None if there is none, or it is malformed."""
        cell = self.cells.get(field)
        with suppress(CodecError):
            return None if cell is None else open_envelope(cell.data)
        return None

    def fields(self, field: str) -> dict[str, Any]:
        """Return the undecoded fields of a cell; none without one, or of a malformed one."""
        envelope = self.envelope(field)
        return {} if envelope is None else envelope.fields

    def array(self, field: str, name: str, kinds: str = "iu") -> NDArray[Any] | None:
        """Return a one-dimensional array of a cell, of the given kinds of NumPy dtypes.

        None without one, or if it is lost or in the store of another machine.
        """
        value = self.fields(field).get(name)
        if isinstance(value, TensorRef):
            value = self._array(value)
        is_array = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in kinds
        return value if is_array else None

    def read(self, field: str, expected: type[T]) -> T | None:
        """Decode a cell; None if there is none.

        Raises:
            CodecError: the cell is malformed or has another type.
            StoreError: its arrays are lost, or on another machine.
        """
        cell = self.cells.get(field)
        if cell is None:
            return None
        envelope = open_envelope(cell.data, self._array)
        fields = _without_experts(envelope.fields)
        if lost := [name for name, value in fields.items() if isinstance(value, TensorRef)]:
            msg = f"arrays {', '.join(lost)} of {self.row}.{field} are lost, or in the store of another machine"
            raise StoreError(msg)
        return decode_fields(replace(envelope, fields=fields), expected)

    def author(self, field: str) -> str:
        """Return the actor that wrote a cell, `<role>.<n>#<incarnation>`; empty if it is unknown."""
        envelope = self.envelope(field)
        return "" if envelope is None else envelope.author

    def _array(self, reference: TensorRef) -> Any:
        with suppress(StoreError):
            return reference if self._resolve is None else self._resolve(reference)
        return reference


def pack_row(cells: Iterable[RowCell], store: Store) -> bytes:
    """Return a row's cells with their stored arrays, as the body of a frame.

    Arrays that are lost, and experts of router replay, are left out.
    """
    kept: list[list[Any]] = []
    arrays: dict[str, bytes] = {}
    resolve = store.reader()
    for cell in cells:
        if cell.field in NOT_KEPT:
            continue
        kept.append([cell.field, cell.sequence, cell.stored, cell.data])
        arrays |= _arrays_of(cell.data, resolve)
    packed: bytes = msgpack.packb({"cells": kept, "arrays": arrays}, use_bin_type=True)
    return packed


def unpack_row(frame: Frame) -> RowCells:
    """Return the row of a frame; raises RecordError if it is damaged."""
    try:
        body = msgpack.unpackb(read_body(frame), strict_map_key=True)
        cells = [RowCell(str(field), int(at), float(stored), bytes(data)) for field, at, stored, data in body["cells"]]
        arrays = {str(name): bytes(data) for name, data in body["arrays"].items()}
        row, why = RowId.parse(frame.head["row"]), [str(name) for name in frame.head["why"]]
    except (ValueError, TypeError, LookupError, AttributeError, msgpack.UnpackException) as error:
        msg = (
            f"{frame.path}: the frame at byte {frame.offset} is no row ({error}); other rows of the record can be read"
        )
        raise RecordError(msg) from error

    def resolve(reference: TensorRef) -> Any:
        data = arrays.get(_name(reference))
        if data is None or len(data) != reference.nbytes:
            msg = f"array {_name(reference)} was not kept"
            raise StoreError(msg)
        return np.frombuffer(data, reference.dtype).reshape(reference.shape)

    return RowCells(row, cells, resolve, why)


def _name(reference: TensorRef) -> str:
    return f"{reference.uri}:{reference.offset}"


def _arrays_of(data: bytes, resolve: Resolver) -> dict[str, bytes]:
    """Return the bytes of a cell's stored arrays, by the names of their references."""
    references: list[TensorRef] = []

    def collect(reference: TensorRef) -> Any:
        references.append(reference)
        return reference

    arrays: dict[str, bytes] = {}
    with suppress(CodecError):
        fields = open_envelope(data, collect).fields
        left_out = set(map(_name, _experts_of(fields))) if references else ()
        for reference in references:
            if _name(reference) not in left_out:
                with suppress(StoreError):
                    arrays[_name(reference)] = resolve(reference).tobytes()
    return arrays


def _experts_of(value: Any, name: str = "") -> Iterator[TensorRef]:
    """Yield the references of fields with experts, at any depth."""
    if isinstance(value, TensorRef) and name in _EXPERTS:
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _experts_of(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _experts_of(inner)


def _without_experts(value: Any) -> Any:
    """Return fields without experts that are references."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not (k in _EXPERTS and isinstance(v, TensorRef))}
        return {key: _without_experts(inner) for key, inner in kept.items()}
    return [_without_experts(inner) for inner in value] if isinstance(value, list) else value

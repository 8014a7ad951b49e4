"""Encoder of cells that are written together."""

from __future__ import annotations

from typing import Any

from broker.codec import encode
from broker.errors import CodecError
from broker.segment import SegmentWriter
from broker.store import Store
from broker.subjects import Subjects


class CellEncoder:
    """Encodes cells that are written together; cells of a step share a segment.

    Invariant: no cell may be published before `close` has written the segments, so that a process killed in between
    leaves a segment without references, never a reference without a segment.

    `author` is `<role>.<n>#<incarnation>`, and `max_payload` the broker's limit for a message in bytes.
    """

    def __init__(self, subjects: Subjects, store: Store, author: str, max_payload: int) -> None:
        self._subjects, self._store, self._author, self._max_payload = subjects, store, author, max_payload
        self._writers: dict[tuple[str, int], SegmentWriter] = {}

    def encode(self, subject: str, value: Any) -> bytes:
        """Encode one cell; raises CodecError if the value has no encoding or is too large."""
        cell = self._subjects.parse(subject)
        if not cell.field:
            return encode(value, self._author, subject=subject)
        # Segments are collected by step, so only cells of one step share one.
        step = cell.kind, cell.step
        if step not in self._writers:
            self._writers[step] = self._store.segment_writer(cell.row, cell.field, self._author)
        data = encode(value, self._author, self._writers[step].place)
        if len(data) > self._max_payload:
            limit = self._max_payload
            msg = f"cell {subject} has {len(data)} bytes, over the broker's max_payload of {limit}; raise max_payload"
            raise CodecError(msg)
        return data

    def close(self) -> None:
        """Write the segments; raises StoreFullError if no space is left for the arrays."""
        for writer in self._writers.values():
            writer.close()

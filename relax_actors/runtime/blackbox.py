"""Black box of an actor: a small mapped file that outlives the process, even a `kill -9`.

Writing it costs no system call. The supervisor reads it for signs of life, and after a death to learn which rows the
actor was handling and which deliveries it had taken.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path

from broker.pull import Delivery

SIZE = 16 << 10
MAX_DELIVERIES = 512
_HEAD = struct.Struct("<dI")
_DELIVERY = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Content of a black box.

    Attributes:
        beat: time of the last sign of life, in seconds of CLOCK_MONOTONIC.
        rows: rows that the actor is handling.
        waiting_for: what the actor waits for if it handles none.
        since: when `rows` and `waiting_for` were recorded, in seconds since 1970.
        deliveries: the last `MAX_DELIVERIES` messages that the actor took, acknowledged or not, in no order. Filled by
            `read_with_deliveries` only.
    """

    beat: float
    rows: tuple[str, ...] = ()
    waiting_for: str = ""
    since: float = 0.0
    deliveries: tuple[Delivery, ...] = ()


class BlackBox:
    """Recorder of one actor; a new incarnation overwrites the record of the previous one.

    Args:
        path: the file; created if missing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            size = SIZE + MAX_DELIVERIES * _DELIVERY.size
            # Allocate the blocks now: a write into a hole of a mapped file on a full disk kills the process.
            os.posix_fallocate(file.fileno(), 0, size)
            self._map = mmap.mmap(file.fileno(), size)
        self._taken = 0

    def beat(self) -> None:
        """Record a sign of life."""
        struct.pack_into("<d", self._map, 0, time.monotonic())

    def record(self, rows: list[str], waiting_for: str = "") -> None:
        """Record the rows being handled, or what the actor waits for; also a sign of life."""
        now = round(time.time(), 3)
        body = json.dumps([rows, waiting_for, now]).encode()
        if len(body) > SIZE - _HEAD.size:
            body = json.dumps([rows[:64], waiting_for[:1000], now]).encode()
        # Write the length last, so that a reader never parses a half-written text.
        _HEAD.pack_into(self._map, 0, time.monotonic(), 0)
        self._map[_HEAD.size : _HEAD.size + len(body)] = body
        struct.pack_into("<I", self._map, 8, len(body))

    def record_delivery(self, delivery: Delivery) -> None:
        """Record a delivery; it overwrites the one `MAX_DELIVERIES` before it."""
        _DELIVERY.pack_into(self._map, SIZE + self._taken % MAX_DELIVERIES * _DELIVERY.size, *delivery)
        self._taken += 1

    def reset(self) -> None:
        """Start the record of a new incarnation: no rows, no deliveries."""
        self._map[SIZE:] = bytes(MAX_DELIVERIES * _DELIVERY.size)
        self._taken = 0
        self.record([], "start")

    def read(self) -> Snapshot:
        """Read the current record, without deliveries; safe while the actor writes."""
        beat, length = _HEAD.unpack_from(self._map)
        try:
            rows, waiting_for, since = json.loads(self._map[_HEAD.size : _HEAD.size + length])
            return Snapshot(beat, tuple(rows), waiting_for, since)
        except (ValueError, TypeError):
            return Snapshot(beat)

    def read_with_deliveries(self) -> Snapshot:
        """Read the current record with its deliveries; call it after the actor's death."""
        deliveries = tuple(Delivery(*numbers) for numbers in _DELIVERY.iter_unpack(self._map[SIZE:]) if any(numbers))
        return replace(self.read(), deliveries=deliveries)

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

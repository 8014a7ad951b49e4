"""What an actor was doing, kept where it outlives the actor: a small mapped file, written without a system call.

The supervisor reads it for signs of life, and after a death to know which rows were in hand.
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
    """`beat` is the last sign of life (seconds, CLOCK_MONOTONIC); `rows` are in hand; `waiting_for` says for what.

    `since` is when this was so first (seconds since 1970). `taken` are the last `MAX_DELIVERIES` deliveries, finished or not, in
    no order; read after a death only.
    """

    beat: float
    rows: tuple[str, ...] = ()
    waiting_for: str = ""
    since: float = 0.0
    deliveries: tuple[Delivery, ...] = ()


class BlackBox:
    """One actor's recorder; a new life writes over the old one's.

    Args:
        path: the file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            size = SIZE + MAX_DELIVERIES * _DELIVERY.size
            # With room of its own: a write into a hole of a mapped file on a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, size)
            self._map = mmap.mmap(file.fileno(), size)
        self._taken = 0

    def beat(self) -> None:
        """Give a sign of life."""
        struct.pack_into("<d", self._map, 0, time.monotonic())

    def record(self, rows: list[str], waiting_for: str = "") -> None:
        """Say which rows are in hand, or what is waited for; a sign of life too."""
        now = round(time.time(), 3)
        body = json.dumps([rows, waiting_for, now]).encode()
        if len(body) > SIZE - _HEAD.size:
            body = json.dumps([rows[:64], waiting_for[:1000], now]).encode()
        # The length is written last: a reader never takes half a text for a whole one.
        _HEAD.pack_into(self._map, 0, time.monotonic(), 0)
        self._map[_HEAD.size : _HEAD.size + len(body)] = body
        struct.pack_into("<I", self._map, 8, len(body))

    def record_delivery(self, delivery: Delivery) -> None:
        """Note a delivery; it takes the place of the one `MAX_DELIVERIES` before it."""
        _DELIVERY.pack_into(self._map, SIZE + self._taken % MAX_DELIVERIES * _DELIVERY.size, *delivery)
        self._taken += 1

    def reset(self) -> None:
        """Start a new life's record: nothing in hand, nothing taken."""
        self._map[SIZE:] = bytes(MAX_DELIVERIES * _DELIVERY.size)
        self._taken = 0
        self.record([], "start")

    def read(self) -> Snapshot:
        """The last entry."""
        beat, length = _HEAD.unpack_from(self._map)
        try:
            rows, waiting_for, since = json.loads(self._map[_HEAD.size : _HEAD.size + length])
            return Snapshot(beat, tuple(rows), waiting_for, since)
        except (ValueError, TypeError):
            return Snapshot(beat)

    def read_with_deliveries(self) -> Snapshot:
        """The last entry, with what was taken."""
        deliveries = tuple(Delivery(*numbers) for numbers in _DELIVERY.iter_unpack(self._map[SIZE:]) if any(numbers))
        return replace(self.read(), deliveries=deliveries)

    def close(self) -> None:
        """Unmap."""
        self._map.close()

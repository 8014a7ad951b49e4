"""Black box of an actor: a small mapped file that outlives the process, even a `kill -9`.

Writing it costs no system call. The supervisor reads it for signs of life, and after a death to learn which rows the
actor was handling and which deliveries it had taken.

The record is read through the file, never through the map, and believed only as far as its types go: the actor, which
may run hostile code, can write anything into the file and make it shorter, and access to a map behind the end of its
file kills a process.

Invariant: the time of the last sign of life and the length of the text change in one store each, through a view of
their type. `struct.pack_into` clears its target first, and a supervisor that reads 0 there kills a healthy process.
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
_BEAT, _LENGTH, _TEXT = slice(0, 8), slice(8, 12), 12
_DELIVERY = struct.Struct("<QQQ")
_HEAD = struct.Struct("=dI")
HEAD_READS = 8
_WAITS = b'[[], "'
"""Prefix of a record without rows; the reason for waiting follows, which may be empty."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Content of a black box.

    Attributes:
        beat: time of the last sign of life, in seconds of CLOCK_MONOTONIC.
        rows: rows that the actor is handling.
        waiting_for: what the actor waits for; it may handle rows meanwhile.
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
    """Recorder of one actor; a new incarnation overwrites the record of the previous one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            size = SIZE + MAX_DELIVERIES * _DELIVERY.size
            # Allocate the blocks now: a write into a hole of a mapped file on a full disk kills the process.
            os.posix_fallocate(file.fileno(), 0, size)
            self._map = mmap.mmap(file.fileno(), size)
            self._file = os.dup(file.fileno())
        self._beat = memoryview(self._map)[_BEAT].cast("d")
        self._length = memoryview(self._map)[_LENGTH].cast("I")
        self._taken = 0

    def beat(self) -> None:
        """Record a sign of life."""
        self._beat[0] = time.monotonic()

    def record(self, rows: list[str], waiting_for: str = "") -> None:
        """Record the rows being handled and what the actor waits for; also a sign of life."""
        now = round(time.time(), 3)
        body = json.dumps([rows, waiting_for, now]).encode()
        if len(body) > SIZE - _TEXT:
            body = json.dumps([rows[:64], waiting_for[:1000], now]).encode()
        # Write the length last, so that a reader never parses a half-written text.
        self._length[0] = 0
        self._map[_TEXT : _TEXT + len(body)] = body
        self._length[0] = len(body)
        self.beat()

    def record_delivery(self, delivery: Delivery) -> None:
        """Record a delivery; it overwrites the one `MAX_DELIVERIES` before it."""
        _DELIVERY.pack_into(self._map, SIZE + self._taken % MAX_DELIVERIES * _DELIVERY.size, *delivery)
        self._taken += 1

    def forget_deliveries(self) -> None:
        """Forget all deliveries: the actor has returned or acknowledged them."""
        self._map[SIZE:] = bytes(MAX_DELIVERIES * _DELIVERY.size)
        self._taken = 0

    def reset(self) -> None:
        """Start the record of a new incarnation: no rows, no deliveries."""
        self.forget_deliveries()
        self.record([], "start")

    def read(self) -> Snapshot:
        """Read the record, without deliveries, also while it is written."""
        beat, length = self._head()
        try:
            rows, waiting_for, since = json.loads(os.pread(self._file, min(length, SIZE - _TEXT), _TEXT))
            "".join((*rows, waiting_for)).encode()  # raises unless all of them are text, without half surrogate pairs
            return Snapshot(beat, tuple(rows), waiting_for, float(since))
        except (ValueError, TypeError, OverflowError, RecursionError):
            return Snapshot(beat)

    def waits(self) -> bool:
        """Return whether the actor handles no row and waits; reads a few bytes."""
        begin = os.pread(self._file, len(_WAITS) + 1, _TEXT)
        return begin.startswith(_WAITS) and not begin.endswith(b'"')

    def last_beat(self) -> float:
        """Return the time of the last sign of life; 0 if the file was cut off."""
        return self._head()[0]

    def _head(self) -> tuple[float, int]:
        """Read time and length, until two copies are equal: they may change meanwhile."""
        head = os.pread(self._file, _HEAD.size, 0)
        for _ in range(HEAD_READS):
            before, head = head, os.pread(self._file, _HEAD.size, 0)
            if head == before:
                break
        beat, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (0.0, 0)
        return beat, length

    def read_with_deliveries(self) -> Snapshot:
        """Read the current record with its deliveries; call it after the actor's death."""
        data = os.pread(self._file, MAX_DELIVERIES * _DELIVERY.size, SIZE)
        whole = data[: len(data) - len(data) % _DELIVERY.size]
        deliveries = tuple(Delivery(*numbers) for numbers in _DELIVERY.iter_unpack(whole) if any(numbers))
        return replace(self.read(), deliveries=deliveries)

    def close(self) -> None:
        """Unmap and close the file."""
        self._beat.release()
        self._length.release()
        self._map.close()
        os.close(self._file)

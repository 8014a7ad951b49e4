"""Frames: parts of a record's segment, with heads that are read alone.

    magic | bytes of the head | bytes of the body | checksum of head and sizes | checksum of the body | head | body

Sizes are uint32, checksums xxh3-64, all little-endian. The head is a map in msgpack; the body is compressed by zlib.
The heads are the index of the record: a reader seeks from head to head.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgpack
import xxhash

from relax_actors.errors import RecordError

_MAGIC = b"RXF1"
_PREFIX = struct.Struct("<4sIIQQ")
_MAX_HEAD = 1 << 20
MAX_RAW = 1 << 30
"""Largest body before compression, in bytes."""
_SEARCH = 1 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame in a segment.

    Attributes:
        path: file of the segment.
        offset: position of the frame, in bytes.
        head: what the frame is about.
        body_at: position of the body, in bytes.
        body_size: compressed size of the body, in bytes.
        checksum: xxh3-64 of the compressed body.
    """

    path: Path
    offset: int
    head: dict[str, Any]
    body_at: int
    body_size: int
    checksum: int

    @property
    def end(self) -> int:
        """Position behind the frame, in bytes."""
        return self.body_at + self.body_size


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a segment that are no frame.

    Attributes:
        path: file of the segment.
        offset: position of the first of them.
        size: how many.
        last: whether they reach to the end of the file, as those of a frame that is still being written.
    """

    path: Path
    offset: int
    size: int
    last: bool

    def __str__(self) -> str:
        return f"{self.path} is damaged: {self.size} bytes from byte {self.offset} on are skipped, the rest is read"


def pack_frame(head: dict[str, Any], body: bytes) -> bytes:
    """Return a frame of head and compressed body; raises RecordError."""
    if len(body) > MAX_RAW:
        msg = f"a kept row has {len(body)} bytes, more than the {MAX_RAW} that a frame holds; it is not kept"
        raise RecordError(msg)
    packed: bytes = msgpack.packb({**head, "raw": len(body)})
    compressed = zlib.compress(body) if body else b""
    sizes = struct.pack("<II", len(packed), len(compressed))
    checksums = xxhash.xxh3_64_intdigest(sizes + packed), xxhash.xxh3_64_intdigest(compressed)
    return _PREFIX.pack(_MAGIC, len(packed), len(compressed), *checksums) + packed + compressed


def frames_of(path: Path) -> Iterator[Frame | Damage]:
    """Yield the frames of a segment in order; what is damaged is yielded as such, and skipped.

    Bodies are not read. A segment that was removed meanwhile has no frames.

    Raises:
        RecordError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            size, at = os.fstat(file.fileno()).st_size, 0
            while at < size:
                frame = _frame_at(file, path, at, size)
                if frame is not None:
                    yield frame
                    at = frame.end
                    continue
                following = _next_frame(file, path, at + 1, size)
                yield Damage(path, at, following - at, following == size)
                at = following
    except FileNotFoundError:
        return
    except OSError as error:
        msg = f"{path} cannot be read: {error}; use the user who started the run"
        raise RecordError(msg) from error


def read_body(frame: Frame) -> bytes:
    """Return a frame's body; raises RecordError if damaged or removed."""
    try:
        with frame.path.open("rb") as file:
            file.seek(frame.body_at)
            data = file.read(frame.body_size)
    except OSError as error:
        msg = f"{frame.path} cannot be read any more ({error}); the oldest rows of a record go first (record.max_mib)"
        raise RecordError(msg) from error
    if len(data) != frame.body_size or xxhash.xxh3_64_intdigest(data) != frame.checksum:
        what = frame.head.get("row", "a frame")
        msg = f"{frame.path} is damaged at byte {frame.body_at}: {what} cannot be read; other rows of the record can"
        raise RecordError(msg)
    raw = frame.head["raw"]
    body = zlib.decompressobj().decompress(data, raw) if raw else b""
    if len(body) != raw:
        msg = f"{frame.path}: the frame at byte {frame.offset} holds {len(body)} bytes instead of {raw}; it is skipped"
        raise RecordError(msg)
    return body


def _frame_at(file: IO[bytes], path: Path, at: int, size: int) -> Frame | None:
    """Return the frame at a position; None if there is no whole one."""
    file.seek(at)
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return None
    magic, head_size, body_size, head_sum, body_sum = _PREFIX.unpack(prefix)
    body_at = at + _PREFIX.size + head_size
    if magic != _MAGIC or head_size > _MAX_HEAD or body_at + body_size > size:
        return None
    packed = file.read(head_size)
    if xxhash.xxh3_64_intdigest(prefix[4:12] + packed) != head_sum:
        return None
    try:
        head = msgpack.unpackb(packed, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    if not isinstance(head, dict) or type(raw := head.get("raw")) is not int or not 0 <= raw <= MAX_RAW:
        return None
    return Frame(path, at, head, body_at, body_size, body_sum)


def _next_frame(file: IO[bytes], path: Path, at: int, size: int) -> int:
    """Return the first whole frame at or behind a position, or the file's end."""
    while at < size:
        file.seek(at)
        block = file.read(_SEARCH)
        begin = 0
        while (begin := block.find(_MAGIC, begin)) >= 0:
            if _frame_at(file, path, at + begin, size) is not None:
                return at + begin
            begin += 1
        # A magic may lie across two blocks.
        at += max(1, len(block) - len(_MAGIC) + 1)
    return size

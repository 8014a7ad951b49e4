"""Segments: the files of a record, and the writer that keeps them within a number of bytes."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from broker.files import make_private_folder, open_lock
from relax_actors.errors import RecordError, UnsafePathError
from relax_actors.record.frames import Damage, frames_of, pack_frame

MIN_SEGMENT = 64 << 10
"""Smallest size at which a segment is full, in bytes; the largest one is 8 MiB."""
_MAX_SEGMENT = 8 << 20
_SEGMENTS, _LARGEST = 16, 4
"""Segments that fill the record; part of the record that a single row may take."""


class Shelf(StrEnum):
    """Kind of a segment; a full record removes the oldest of the first shelf with any."""

    ROWS = "rows"
    """Rows kept by `record.every`, `record.share`, `record.highest` or `record.lowest`."""
    SPECIAL = "special"
    """Rows that failed, and held-out rows."""
    STEPS = "steps"
    """The groups of each step, and which versions were evaluated; small."""


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """A segment: its number on its shelf, which grows with time, and its file."""

    number: int
    shelf: Shelf
    path: Path

    @property
    def size(self) -> int:
        """Bytes of the file; 0 if it was removed."""
        with suppress(OSError):
            return self.path.stat().st_size
        return 0


def segments_in(folder: Path, shelf: Shelf | None = None) -> list[Segment]:
    """Return the segments of a record, of one shelf or of all, oldest first."""
    segments = []
    for path in folder.iterdir() if folder.is_dir() else ():
        number, _, name = path.name.partition(".")
        if number.isdigit() and name in set(Shelf) and shelf in (None, name):
            segments.append(Segment(int(number), Shelf(name), path))
    return sorted(segments)


class SegmentWriter:
    """Appends frames to the segments of a folder; one process at a time.

    A process that is killed while it appends leaves an unfinished frame at the end of a segment. The next one removes
    it. The bound holds at every moment: room is made before a frame is written.

    Args:
        folder: folder of the record; created if it does not exist.
        max_bytes: bytes of all segments together.

    Attributes:
        removed: damaged ends of segments that were removed.

    Raises:
        RecordError: another process writes the record, or the folder cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._full = min(_MAX_SEGMENT, max(MIN_SEGMENT, max_bytes // _SEGMENTS))
        self._fds: dict[Shelf, int] = {}
        try:
            make_private_folder(folder)
            self._lock = open_lock(folder / "lock")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            msg = f"{folder} is being written by another process; stop that process"
            raise RecordError(msg) from error
        except (OSError, UnsafePathError) as error:
            msg = f"record {folder} cannot be written: {error}; repair the folder, or set record.max_mib = 0"
            raise RecordError(msg) from error
        self.removed: list[Damage] = []
        self._sizes: dict[Segment, int] = {}
        self._open: dict[Shelf, Segment] = {}
        for segment in segments_in(folder):
            self._open[segment.shelf] = segment
            self._sizes[segment] = segment.size
        for segment in self._open.values():
            self._mend(segment)

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(self._sizes.values())

    def append(self, shelf: Shelf, head: dict[str, Any], body: bytes = b"") -> bool:
        """Append a frame; return False if it is too large for the record.

        Raises:
            OSError: it cannot be written.
            RecordError: the body is too large for a frame.
        """
        data = pack_frame(head, body)
        if len(data) > self._max_bytes // _LARGEST:
            return False
        segment = self._open.get(shelf)
        if segment is None or (self._sizes[segment] and self._sizes[segment] + len(data) > self._full):
            segment = self._begin(shelf)
        self._make_room(len(data))
        self._write(segment, data)
        return True

    def close(self) -> None:
        """Close the files, and let another process write."""
        for fd in (*self._fds.values(), self._lock):
            os.close(fd)

    def _begin(self, shelf: Shelf) -> Segment:
        """Begin a new segment."""
        if (fd := self._fds.pop(shelf, None)) is not None:
            os.close(fd)
        last = self._open.get(shelf)
        number = 0 if last is None else last.number + 1
        segment = Segment(number, shelf, self._folder / f"{number:08d}.{shelf}")
        self._open[shelf], self._sizes[segment] = segment, 0
        return segment

    def _make_room(self, needed: int) -> None:
        """Remove full segments until a frame fits."""
        for shelf in Shelf:
            for segment in sorted(each for each in self._sizes if each.shelf is shelf):
                if self.size + needed <= self._max_bytes:
                    return
                if segment != self._open[shelf]:
                    segment.path.unlink(missing_ok=True)
                    del self._sizes[segment]

    def _write(self, segment: Segment, data: bytes) -> None:
        if segment.shelf not in self._fds:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fds[segment.shelf] = os.open(segment.path, flags, 0o600)
        fd = self._fds[segment.shelf]
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(fd, left) :]
        except OSError:
            os.ftruncate(fd, self._sizes[segment])
            raise
        self._sizes[segment] += len(data)

    def _mend(self, segment: Segment) -> None:
        """Remove an unfinished frame at the end of a segment."""
        last = None
        for last in frames_of(segment.path):  # noqa: B007 the last one counts
            pass
        if isinstance(last, Damage) and last.last:
            self.removed.append(last)
            os.truncate(segment.path, last.offset)
            self._sizes[segment] = last.offset

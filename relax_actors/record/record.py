"""Record of a run: the rows that its folder keeps for people, and the groups of every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from broker.subjects import RowId
from relax_actors.errors import RecordError, SubjectError
from relax_actors.record.frames import Damage, Frame, frames_of, read_body
from relax_actors.record.row_cells import RowCells, unpack_row
from relax_actors.record.rules import End, Group
from relax_actors.record.segments import Segment, Shelf, segments_in


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What the record says about a step.

    Attributes:
        step: the step.
        groups: its rows; empty if they were collected before they could be read.
        batch: fields of its cell `batch`, without `rows`.
        collected: whether the rows were collected before they could be read.
    """

    step: int
    groups: tuple[Group, ...] = ()
    batch: dict[str, Any] = field(default_factory=dict)
    collected: bool = False

    def pack(self) -> bytes:
        """Return the step as the body of a frame."""
        groups = [
            [each.index, each.end, each.reason, np.array(each.rewards, "<f4").tobytes(), each.oldest, each.tokens]
            for each in self.groups
        ]
        packed: bytes = msgpack.packb({"groups": groups, "batch": self.batch, "collected": self.collected})
        return packed

    @classmethod
    def of(cls, frame: Frame) -> StepRecord:
        """Return the step of a frame; raises RecordError if it is damaged."""
        try:
            body = msgpack.unpackb(read_body(frame), strict_map_key=True)
            groups = tuple(
                Group(int(index), End(end), str(reason), tuple(np.frombuffer(rewards, "<f4").tolist()), oldest, tokens)
                for index, end, reason, rewards, oldest, tokens in body["groups"]
            )
            return cls(frame.head["step"], groups, dict(body["batch"]), bool(body["collected"]))
        except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
            msg = f"{frame.path}: the frame at byte {frame.offset} is no step ({error}); other steps can be read"
            raise RecordError(msg) from error


class Record:
    """Reads a run's record, also while it is written; its index is kept.

    The folder may be missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Segment, tuple[int, list[Frame | Damage]]] = {}

    @property
    def exists(self) -> bool:
        """Whether the run has a record."""
        return bool(segments_in(self._folder))

    def rows(self, kind: str = "", step: int | None = None) -> list[RowId]:
        """Return kept rows of a kind and step, in the order of their keeping."""
        return [row for row in self._index() if kind in ("", row.kind) and step in (None, row.step)]

    def row(self, row: RowId) -> RowCells | None:
        """Return a kept row, or None; raises RecordError if it is damaged, or was removed meanwhile."""
        frame = self._index().get(row)
        return None if frame is None else unpack_row(frame)

    def steps(self) -> list[int]:
        """Return the recorded steps, ascending."""
        return sorted(self._numbers("step"))

    def step(self, step: int) -> StepRecord | None:
        """Return what the record says about a step, or None; raises RecordError if it is damaged."""
        frame = self._numbers("step").get(step)
        return None if frame is None else StepRecord.of(frame)

    def versions(self) -> list[int]:
        """Return the evaluated versions of which rows are kept, ascending."""
        return sorted(self._numbers("version"))

    def damages(self) -> list[Damage]:
        """Return the damaged parts, which are skipped."""
        segments = segments_in(self._folder)
        newest = {segment.shelf: segment for segment in segments}
        damaged = [(segment, part) for segment in segments for part in self._parts(segment) if isinstance(part, Damage)]
        return [part for segment, part in damaged if not (part.last and segment == newest[segment.shelf])]

    def _numbers(self, name: str) -> dict[int, Frame]:
        frames = self._frames(Shelf.STEPS)
        return {frame.head[name]: frame for frame in frames if isinstance(frame.head.get(name), int)}

    def _index(self) -> dict[RowId, Frame]:
        frames: dict[RowId, Frame] = {}
        for frame in self._frames(Shelf.ROWS, Shelf.SPECIAL):
            if (row := row_of(frame)) is not None:
                frames.setdefault(row, frame)
        return dict(sorted(frames.items(), key=lambda item: item[1].head.get("time", 0.0)))

    def _frames(self, *shelves: Shelf) -> Iterator[Frame]:
        for shelf in shelves:
            for segment in segments_in(self._folder, shelf):
                yield from (part for part in self._parts(segment) if isinstance(part, Frame))

    def _parts(self, segment: Segment) -> list[Frame | Damage]:
        """Return the parts of a segment, which is read again only if its size has changed."""
        size = segment.size
        if segment not in self._known or self._known[segment][0] != size:
            self._known = {known: parts for known, parts in self._known.items() if known.size}
            self._known[segment] = size, list(frames_of(segment.path))
        return self._known[segment][1]


def row_of(frame: Frame) -> RowId | None:
    """Return the row that a frame keeps; None if it is about something else."""
    try:
        return RowId.parse(frame.head["row"])
    except (SubjectError, LookupError, TypeError):
        return None

"""Recorder: reads the table as an observer, and writes the rows of [record]."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import structlog

from broker.codec import open_envelope
from broker.connection import Connection
from broker.history import History
from broker.store import Store
from broker.subjects import RowId, Subjects
from broker.table import Cell
from relax_actors.errors import CodecError, RecordError, SubjectError
from relax_actors.record.groups import groups_of
from relax_actors.record.position import Position
from relax_actors.record.record import Record, StepRecord
from relax_actors.record.row_cells import RowCell, pack_row
from relax_actors.record.rules import Group, kept_groups, kept_held_out, shelf_of
from relax_actors.record.segments import SegmentWriter, Shelf

if TYPE_CHECKING:
    from relax_actors.config.record import RecordSection

CALL_SECONDS = 60.0
ENDS = ("dropped", "quarantined")
"""Columns that end a row that is not trained."""
MANY_ROWS = 4
"""Kept rows of a step from which on all of its rows are read at once."""
RESERVE_BYTES = 256 << 20
"""Free space of the disk that is left to the run: with less, nothing is kept."""
log = structlog.get_logger()
Cells: TypeAlias = dict[int, dict[str, RowCell]]
"""Cells of the rows of one step: index -> column -> cell."""


class Recorder:
    """Writes a run's record: a step's rows once its batch is complete, then the step.

    The record itself says how far it is. A recorder that is killed goes on behind the last recorded step, and leaves
    out the rows of the next one that it has already: no row is kept twice, and no row is missed that the table still
    has. In memory it holds the cells of one step, and the arrays of one row.

    Args:
        connection: connection of an observer of the run.
        subjects: subjects of the run.
        store: the store of the run; arrays that it does not have on this machine are left out.
        section: which rows are kept.
        seed: seed of the run.
        folder: folder of the record.

    Raises:
        RecordError: another process writes the record, or it cannot be written.
    """

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        store: Store,
        section: RecordSection,
        seed: int,
        folder: Path,
    ) -> None:
        self._connection, self._subjects, self._store = connection, subjects, store
        self._section, self._seed, self._folder = section, seed, folder
        self._writer = SegmentWriter(folder, section.max_mib << 20)
        for damage in self._writer.removed:
            log.warning("unfinished_frame_removed", file=str(damage.path), offset=damage.offset, size=damage.size)
        record = Record(folder)
        for damage in record.damages():
            log.warning("record_damaged", what=str(damage))
        self._step = max(record.steps(), default=-1)
        self._version = max(record.versions(), default=-1)
        last = {"group": self._step, "eval": self._version}
        self._written = {row for row in record.rows() if row.step > last.get(row.kind, -1)}
        self._batches = self._history(subjects.numbered("batch", "*"))
        self._evaluations = self._history(subjects.numbered("evaluation", "*"))
        self._due_steps: dict[int, dict[str, Any]] = {}
        self._due_versions: dict[int, dict[str, Any]] = {}
        self._full = False

    @property
    def size(self) -> int:
        """Bytes of the record."""
        return self._writer.size

    @property
    def position(self) -> Position:
        """How far the record is."""
        return Position(self._step, self._version)

    def catch_up(self) -> None:
        """Record ended steps and versions; raises BrokerError or OSError."""
        self._take_new(self._batches, self._due_steps)
        self._take_new(self._evaluations, self._due_versions)
        # What a failure leaves due is recorded by the next call.
        for step in sorted(self._due_steps):
            if step > self._step:
                self._record_step(step, self._due_steps[step])
            del self._due_steps[step]
        for version in sorted(self._due_versions):
            if version > self._version:
                self._record_evaluation(version)
            del self._due_versions[version]

    def close(self) -> None:
        """Close the record."""
        self._writer.close()

    def _record_step(self, step: int, batch: dict[str, Any]) -> None:
        trained = [index for index in batch.get("rows", ()) if isinstance(index, int)]
        cells, is_whole = self._deciding_cells(step)
        groups = groups_of(step, cells, trained, self._store.reader())
        kept = kept_groups(self._section, self._seed, step, groups)
        if not is_whole:
            cells = self._kept_cells(step, kept)
            of_kept = [index for index in trained if index in cells]
            groups = _updated(groups, groups_of(step, cells, of_kept, self._store.reader()))
        for index, why in kept.items():
            self._keep(RowId(step, index), why, cells.get(index, {}))
        # Cells of a step are removed together.
        collected = bool(trained) and is_whole and not cells
        if collected:
            log.warning("step_collected", step=step, why="a checkpoint removed its rows before they could be read")
        facts = {name: value for name, value in batch.items() if name != "rows"}
        entry = StepRecord(step, () if collected else groups, facts, collected)
        self._append(Shelf.STEPS, {"step": step}, entry.pack())
        self._step = step
        self._written = {row for row in self._written if row.kind != "group"}

    def _kept_cells(self, step: int, kept: Collection[int]) -> Cells:
        """Return the cells of kept rows, or of all rows of the step where many are kept."""
        rows = [f"{self._subjects.prefix}.{RowId(step, index)}.>" for index in kept]
        return self._cells(*(rows if len(rows) <= MANY_ROWS else [f"{self._subjects.prefix}.group.{step}.>"]))

    def _deciding_cells(self, step: int) -> tuple[Cells, bool]:
        """Return the cells that decide which rows are kept, and whether these are all.

        These are the rewards, unless rows have failed, whose successors may have no reward, or rows are not scored.
        """
        columns = ("reward", *ENDS)
        cells = self._cells(*(self._subjects.column(column, "group", step) for column in columns))
        is_enough = bool(cells) and not any(name in ENDS for row in cells.values() for name in row)
        return (cells, False) if is_enough else (self._cells(f"{self._subjects.prefix}.group.{step}.>"), True)

    def _record_evaluation(self, version: int) -> None:
        if self._section.evaluation:
            cells = self._pages(self._history(self._subjects.column("reward", "eval", version)))
            indices = sorted(self._subjects.parse(cell.subject).index for cell in cells)
            for row in (RowId(version, index, "eval") for index in kept_held_out(self._section, indices)):
                self._keep(row, ["evaluation"], self._cells(f"{self._subjects.prefix}.{row}.>").get(row.index, {}))
        self._append(Shelf.STEPS, {"version": version})
        self._version = version
        self._written = {row for row in self._written if row.kind != "eval"}

    def _cells(self, *subjects: str) -> Cells:
        """Return the cells of rows of one step with these subjects, which may have wildcards."""
        by_index: defaultdict[int, dict[str, RowCell]] = defaultdict(dict)
        for cell in self._pages(*map(self._history, subjects)):
            place = self._subjects.parse(cell.subject)
            by_index[place.index][place.field] = RowCell(place.field, cell.sequence, cell.stored, cell.data)
        return dict(by_index)

    def _keep(self, row: RowId, why: list[str], cells: dict[str, RowCell]) -> None:
        """Keep a row, unless it is kept already, or the table has it no more."""
        if row in self._written or not cells:
            return
        try:
            body = pack_row(cells.values(), self._store)
            is_kept = self._append(shelf_of(why), {"row": str(row), "why": why}, body)
            reason = "it takes more than a quarter of record.max_mib"
        except RecordError as error:
            is_kept, reason = False, str(error)
        self._written.add(row)
        if not is_kept and not self._full:
            log.warning("row_not_kept", row=str(row), reason=reason)

    def _append(self, shelf: Shelf, head: dict[str, Any], body: bytes = b"") -> bool:
        """Append a frame, unless the run needs the space of the disk."""
        full = shutil.disk_usage(self._folder).free < RESERVE_BYTES + len(body)
        if full and not self._full:
            log.warning("disk_full", folder=str(self._folder), reserve=RESERVE_BYTES)
        self._full = full
        return not full and self._writer.append(shelf, {**head, "time": round(time.time(), 3)}, body)

    def _take_new(self, history: History, due: dict[int, dict[str, Any]]) -> None:
        """Add a history's new cells, number -> fields, if their owner wrote them."""
        for cell in self._pages(history):
            with suppress(CodecError):
                fields = open_envelope(cell.data, subject=cell.subject).fields
                due[self._subjects.parse(cell.subject).step] = fields

    def _history(self, subject: str) -> History:
        return History(self._connection, self._subjects.table_stream, subject)

    def _pages(self, *histories: History) -> Iterator[Cell]:
        """Yield unread cells of histories, without subjects that name no cell.

        A history continues behind a page that was read, also after the next page failed: every cell of a page is
        yielded before the next one is read.
        """
        unread = list(histories)
        while unread:
            for cell in self._connection.call(_next_pages(unread), CALL_SECONDS):
                with suppress(SubjectError):
                    self._subjects.parse(cell.subject)
                    yield cell
            unread = [history for history in unread if history.has_more]


def _updated(groups: Iterable[Group], newer: Iterable[Group]) -> tuple[Group, ...]:
    """Return groups by index, with the newer ones in the place of their predecessors."""
    known = {group.index: group for group in (*groups, *newer)}
    return tuple(known[index] for index in sorted(known))


async def _next_pages(histories: Iterable[History]) -> list[Cell]:
    pages = await asyncio.gather(*(history.page() for history in histories))
    return [cell for page in pages for cell in page]

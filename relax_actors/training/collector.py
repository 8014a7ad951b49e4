"""Collector: removes strays and finished rows from the table.

Invariant: it removes only cells that are void or not needed for good. It lists the table, then reads the newest weights
and checkpoint, so that it knows every version that was published before the listing, and removes only cells stored
before the listing. So it may be stopped, killed or replaced at any point, and keeps no state that could be lost.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeAlias, TypeVar

import nats.errors
import structlog

from broker.codec import open_envelope
from broker.shared_files import SharedFiles
from broker.subjects import TURNS, CellId, RowId
from broker.table import Fill
from relax_actors.errors import CodecError, RelaxError, SubjectError
from relax_actors.runtime import Context
from relax_actors.runtime.actor import Actor
from relax_actors.training.extents import UnreadRows, read_extent
from relax_actors.training.strays import FIRST_COLUMNS, Extent, Removal, allowed_bytes, is_late_end, removal

CHECK_SECONDS, KEYS_SECONDS, SWEEP_SECONDS = 0.5, 5.0, 30.0
"""Between two looks at the table's size, at the keys of the bucket, and at all cells while the table grows as usual. A
sweep looks at every cell of the table, which is the trainer's most expensive request."""
FULL_STORE_SECONDS = 5.0
"""Between two sweeps while the store's file system is nearly full: actors may wait for the room of finished rows."""
GROWTH_BYTES, GROWTH_CELLS = 16 << 20, 20_000
"""Growth of the table since the last sweep after which it is swept at once."""
MAX_LISTED = 200_000
"""Cells that one sweep looks at; those of a flood are removed in several sweeps."""
MAX_LOOKUPS, LOOKUPS_AT_ONCE = 5000, 64
"""Rows that one sweep asks for one by one where there are too many to list."""
KEEP_SECONDS = 30.0
"""Time for which media that no row uses are kept for rows to come."""
FULL = 0.9
"""Share of the table's limit, or of the store's file system, from which they are nearly full."""
log = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """Sweep if it is due; sent by a timer every `CHECK_SECONDS`."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Sweep now."""


Message: TypeAlias = Check | Sweep


class Collector(Actor):
    """Sweeps a run's table and bucket beside the trainer, and once more at its end.

    A sweep that fails by an error of its own is reported (event `sweep_failed`) and repeated later: a new incarnation
    of the trainer would fail, too, and the run needs its sweeps only in the long run. `others` has the dataclass of
    each kind of numbered cells that the trainer does not write; None for the kinds of a user's role, whose class is not
    imported here: of their cells only envelope and checksum are checked.
    """

    name = "collector"

    def __init__(self, context: Context, roles: Collection[str], others: Mapping[str, type | None]) -> None:
        super().__init__(context)
        self._roles, self._others, self._table = roles, others, context.table
        self._swept_at = self._keys_due = float("-inf")
        self._swept = Fill(0, 0, 0, 0)
        # Subjects of the numbered cells of other roles that are known to be well-formed.
        self._well_formed: set[str] = set()
        self._unread = UnreadRows(context)
        self._stops = False

    def on_start(self) -> None:
        """Start the timer."""
        super().on_start()
        self.tell_later(CHECK_SECONDS, Check())

    def on_receive(self, message: Message) -> None:
        """Sweep as a message says."""
        match message:
            case Check():
                self._check()
                self.tell_later(CHECK_SECONDS, message)
            case Sweep():
                self._sweep_or_report()

    def _check(self) -> None:
        """Sweep if the table has grown or a sweep is due; raises no exception."""
        try:
            fill = self._table.fill()
            grown = fill.size - self._swept.size > GROWTH_BYTES or fill.cells - self._swept.cells > GROWTH_CELLS
            is_due = time.monotonic() - self._swept_at > self._sweep_seconds()
            if grown or is_due or fill.size > FULL * fill.max_size:
                self._sweep_or_report()
                self._swept_at = time.monotonic()
            elif time.monotonic() > self._keys_due:
                self._remove_keys()
                self._keys_due = time.monotonic() + KEYS_SECONDS
        except (RelaxError, nats.errors.Error, OSError) as error:
            log.warning("sweep_failed", error=f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 the same error would end each incarnation of the trainer
            self._report_failed(error)
            self._keys_due = time.monotonic() + KEYS_SECONDS

    def on_stop(self) -> None:
        """Sweep a last time."""
        with suppress(RelaxError):
            self._stops = True
            self._sweep_or_report()
            self._table.store.close()  # folders of steps that are being removed still link to media
            self._remove_media(0.0)

    def _sweep_seconds(self) -> float:
        """Return the longest time between two sweeps."""
        with suppress(OSError):  # the folder does not exist yet
            disk = shutil.disk_usage(self._table.store.root)
            if disk.used > FULL * (disk.used + disk.free):
                return FULL_STORE_SECONDS
        return SWEEP_SECONDS

    def _sweep_or_report(self) -> None:
        """Sweep; report errors that are not the broker's or the file system's."""
        try:
            self.sweep()
        except (RelaxError, nats.errors.Error, OSError):
            raise
        except Exception as error:  # noqa: BLE001 the same error would end each incarnation of the trainer
            self._report_failed(error)

    def _report_failed(self, error: Exception) -> None:
        text, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        log.error("sweep_failed", error=text, traceback=trace)
        self.context.journal.event("sweep_failed", error=text[:2000], traceback=trace[-8000:])

    def sweep(self) -> Removal:
        """Remove all strays and finished rows that the table holds now."""
        table, before = self._table, self._table.fill()
        cells, malformed = self._list("*.*.*.*", MAX_LISTED)
        turns, malformed_turns = self._list(f"*.*.*.{TURNS}.*.*", MAX_LISTED)
        cells += turns
        malformed += malformed_turns
        first = self._first_cells()
        malformed += self._remove_malformed()
        extent = read_extent(self.context, self._well_formed)
        # When a run is over, its recorder stops, and reads all rows, before its actors are asked to stop.
        if not (self._stops and extent.version >= extent.steps):
            extent = self._unread.extend(extent, before)
        todo = removal(cells, first, extent)
        if first is None:
            todo = self._with_ends(todo, cells, extent)
        culprits = self._writers(todo.strays)
        prefix, end = table.subjects.prefix, before.last + 1
        if todo.bulk:
            table.purge((f"{prefix}.{name}" for name in todo.bulk), before=self._first_needed(extent, end))
        table.purge((f"{prefix}.{name}" for name in todo.filters), before=end)
        table.remove_subjects(malformed, before=end)
        self._remove_keys()
        if first is not None:
            self._remove_files(todo, first, extent)
        self._swept = table.fill()
        self._report(todo, before, culprits)
        return todo

    def _first_needed(self, extent: Extent, end: int) -> int:
        """Return a sequence below `end` before which all row cells are void or below the floor.

        Args:
            extent: read after `end` was the next sequence, so that cells beyond its steps were void when stored.
            end: the result if no row has a cell before it.
        """
        table = self._table
        due = range(extent.floor, extent.version + extent.lead + 2)
        steps = [f"{table.subjects.prefix}.group.{step}.>" for step in due]
        first = table.call(_gather(table.first_sequence_async(name) for name in steps))
        return min([end, *(sequence for sequence in first if sequence is not None)])

    def _remove_malformed(self) -> list[str]:
        """Remove malformed numbered cells; return the subjects that name no cell."""
        table, malformed = self._table, []
        for kind, expected in self._others.items():
            subjects = table.list_subjects(table.subjects.numbered(kind, "*"), MAX_LISTED)
            for subject in set(subjects) - self._well_formed:
                try:
                    table.subjects.parse(subject)
                except SubjectError:
                    malformed.append(subject)
                    continue
                cell = table.get(subject, direct=False)
                if cell is None:
                    continue
                try:
                    if expected is None:
                        open_envelope(cell.data, subject=subject)
                    else:
                        table.read(cell.data, expected, subject=subject)
                    self._well_formed.add(subject)
                except CodecError as error:
                    self.context.journal.event("malformed_cell", subject=subject, error=str(error), removed=True)
                    table.remove([cell])
        return malformed

    def _list(self, name: str, limit: int) -> tuple[list[CellId], list[str]]:
        """List cells of rows, and the subjects that name no cell."""
        cells, malformed = [], []
        for subject in self._table.list_subjects(f"{self._table.subjects.prefix}.{name}", limit):
            try:
                cells.append(self._table.subjects.parse(subject))
            except SubjectError:
                malformed.append(subject)
        return cells, malformed

    def _first_cells(self) -> list[CellId] | None:
        """List the cells that begin or end rows; None if there are too many."""
        listed = [self._list(f"*.*.*.{name}", MAX_LISTED)[0] for name in sorted(FIRST_COLUMNS)]
        return None if any(len(cells) >= MAX_LISTED for cells in listed) else list(chain.from_iterable(listed))

    def _with_ends(self, todo: Removal, cells: list[CellId], extent: Extent) -> Removal:
        """Add ends of rows whose predecessors are looked up one by one.

        Sweep by sweep, they become few enough to be listed again.
        """
        ends = (cell for cell in cells if is_late_end(cell, extent))
        last_rows = [(cell, RowId(cell.step, cell.index - extent.rows)) for cell in islice(ends, MAX_LOOKUPS)]
        filters = [f"{self._table.subjects.prefix}.{row}.*" for _, row in last_rows]
        listed: list[list[str]] = []
        for start in range(0, len(filters), LOOKUPS_AT_ONCE):
            batch = filters[start : start + LOOKUPS_AT_ONCE]
            listed += self._table.call(_gather(self._table.list_subjects_async(name) for name in batch))
        strays = [
            cell
            for (cell, _), subjects in zip(last_rows, listed, strict=True)
            if not any(subject.rpartition(".")[2] in FIRST_COLUMNS for subject in subjects)
        ]
        wanted = (*todo.filters, *(f"{cell.row}.>" for cell in strays))
        return Removal(tuple(dict.fromkeys(wanted)), (*todo.strays, *strays), todo.finished)

    def _writers(self, strays: Iterable[CellId]) -> dict[str, int]:
        """Count strays by their author, as one cell of each column names it, `<role>.<n>`."""
        columns: dict[str, CellId] = {}
        counts: Counter[str] = Counter()
        for cell in strays:
            columns.setdefault(cell.field, cell)
            counts[cell.field] += 1
        named: Counter[str] = Counter()
        for field, cell in columns.items():
            author = f"the writer of column {field}"
            message = self._table.get(f"{self._table.subjects.prefix}.{cell.row}.{field}", direct=False)
            with suppress(CodecError):
                if message is not None:
                    author = open_envelope(message.data).author.partition("#")[0][:80]
            named[author] += counts[field]
        return dict(named)

    def _remove_files(self, todo: Removal, first: list[CellId], extent: Extent) -> None:
        """Remove the segments of finished rows, and the counts of failures of rows that are gone."""
        store = self._table.store
        for name in store.list_names("group"):
            if name.isdigit() and int(name) < extent.floor:
                store.remove_later(f"group/{name}")
        self._remove_media(KEEP_SECONDS)
        begun = {cell.row for cell in first}
        evaluating = {f"eval.{row.step}" for row in begun if row.kind == "eval"} - set(todo.finished)
        # Not those of an evaluation without a result: its media are stored before its rows begin.
        done = {str(version) for version in extent.results - {max(extent.results, default=-1)}}
        for name in done.intersection(store.list_names("eval")):
            if f"eval.{name}" not in evaluating:
                store.remove_later(f"eval/{name}")

        def is_gone(row: RowId) -> bool:
            below = row.kind == "group" and row.step < extent.floor
            return below or row not in begun or f"eval.{row.step}" in todo.finished

        self._table.call(self.context.state.forget_failures(is_gone))

    def _remove_media(self, keep_seconds: float) -> None:
        """Remove features and copies of media that no row uses."""
        if self.context.config.media is not None:
            SharedFiles(self._table.store).remove_orphans(keep_seconds)

    def _remove_keys(self) -> None:
        """Remove keys of the bucket that are unknown, too large or too many."""
        roles = {*self._roles, *self._table.call(self._added_roles())}
        enforced = self.context.state.enforce(lambda key: allowed_bytes(key, roles))
        if forgotten := self._table.call(enforced):
            self.context.journal.event("keys_removed", keys=forgotten)

    async def _added_roles(self) -> list[str]:
        """Return the roles that the run has now; some may have been added."""
        body = await self.context.state.get("run")
        consumers = body.get("consumers") if isinstance(body, dict) else None
        return [str(name) for name in consumers] if isinstance(consumers, dict) else []

    def _report(self, todo: Removal, before: Fill, culprits: dict[str, int]) -> None:
        """Publish what was removed, and what fills the table if it is nearly full."""
        journal = self.context.journal
        names = " and ".join(sorted(culprits, key=lambda name: -culprits[name])[:3])
        if todo.strays:
            mib = max(0, before.size - self._swept.size) >> 20
            journal.event("strays_removed", cells=len(todo.strays), mib=mib, by=names)
        if before.size > FULL * before.max_size > 0:
            share = round(100 * before.size / before.max_size)
            journal.event("table_full", percent=share, max_bytes=before.max_size, by=names)


def remove_void(context: Context, version: int) -> None:
    """Remove the void cells of the step that becomes due with a version, before it is published.

    A cell is void if it was stored before the version before; see `Ledger.is_void`.
    """
    config, table = context.config, context.table
    step = version + config.staleness.max
    if version < 1 or step >= config.run.steps:
        return
    previous = table.get(table.subjects.numbered("weights", version - 1), direct=False)
    if previous is not None:
        table.purge([f"{table.subjects.prefix}.group.{step}.>"], before=previous.sequence)


async def _gather(requests: Iterable[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*requests)

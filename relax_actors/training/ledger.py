"""Ledger of a run: a pure state machine over the cells, in the order of the stream.

Invariant: `admitted = trained + dropped + quarantined + in flight` after every cell. A row that fails before its
step's batch is written is owed one successor, whose index is larger by `rows`. Every slot of a step is therefore
filled in the end.

A row is due when its step is within the lead and, for a successor, when its predecessor has ended. A cell of a row
that is not due is a stray. It is stored, and counted only if the row becomes due, unless its row is far from due (more
than one step beyond the lead, or more than `STRAY_REFILLS` refills of its slot). Such a stray is void: it never counts,
and the trainer removes it before the row can become due. So strays take a bounded amount of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from broker.subjects import CellId, RowId
from relax_actors.messages import Batch, Checkpoint, RowCounts

if TYPE_CHECKING:
    from relax_actors.config import Config
    from relax_actors.config.saved import SavedSettings

STRAY_REFILLS = 64
"""Strays of a slot's rows are stored up to so many refills ahead."""


class RowState(StrEnum):
    """State of an admitted row."""

    IN_FLIGHT = "in_flight"
    TRAINED = "trained"
    DROPPED = "dropped"
    QUARANTINED = "quarantined"


# Columns that the ledger counts, in the order in which stray cells of a row are applied. A set of them is a bit mask.
_BITS = {"prompt": 1, "dropped": 2, "quarantined": 4}


@dataclass(frozen=True, slots=True)
class Account:
    """Counts of all rows of the run, by state."""

    admitted: int
    trained: int
    dropped: int
    quarantined: int
    in_flight: int


class Ledger:
    """State of every row, computed from the cells of the table.

    Two ledgers that observe the same cells in the same order are equal: a restarted role rebuilds its own this way.

    Args:
        rows: rows per step (trainer.prompts_per_step).
        steps: steps of the run.
        lead: how many steps ahead of the trained version rows may be admitted (staleness.max).
        has_critic: whether a critic reads the rows, too, so that the floor waits for its checkpoints.
        last: rows of the last step; as many as of the others if None.

    Attributes:
        version: newest published weight version; None before the first.
        floor: first step whose rows are still counted one by one; rows below it are in `totals`.
        totals: counts of the rows below the floor.
        batches: batch of each trained step.
    """

    def __init__(self, rows: int, steps: int, lead: int, *, has_critic: bool = False, last: int | None = None) -> None:
        self._last = rows if last is None else last
        self.rows, self.steps, self.lead = rows, steps, lead
        # Version of the critic's newest checkpoint, which covers the rows of the steps below it.
        self._critic_checkpoint = 0 if has_critic else steps
        self.version: int | None = None
        self.floor = 0
        self.totals = RowCounts()
        self.batches: dict[int, Batch] = {}
        self._states: dict[int, dict[int, RowState]] = {}
        self._owed: dict[RowId, None] = {}
        self._furthest = -1
        # Indices of rows with a cell that ends them, by step: also of trained rows.
        self._ended: dict[int, set[int]] = {}
        # Columns of stray cells as bit masks, by step and index.
        self._strays: dict[int, dict[int, int]] = {}
        # Trained rows whose prompt was not observed.
        self._unadmitted: set[RowId] = set()
        self._violations: list[str] = []
        # First step whose batch is checked, and the rows that the steps below it trained.
        self._checked, self._trained_below = 0, 0

    def skip_batches(self, floor: int, trained: int) -> None:
        """Check no batches of the steps below a floor: the observer has not read them yet.

        Args:
            floor: floor of a checkpoint; 0 to check all batches.
            trained: rows that the steps below it trained, by the totals of the checkpoint.
        """
        self._checked, self._trained_below = floor, trained

    @property
    def checked_from(self) -> int:
        """First step whose batch is checked; 0 if all are, see `skip_batches`."""
        return self._checked

    def observe(self, cell: CellId, value: Batch | Checkpoint | None = None) -> bool:
        """Record one cell.

        Cells may be observed more than once. Cells of other kinds and columns are ignored.

        Args:
            cell: subject of the cell.
            value: content of a `batch`, `checkpoint` or `critic_checkpoint` cell.

        Returns:
            False if the cell is a stray.
        """
        if cell.kind == "weights":
            self.version = cell.step if self.version is None else max(self.version, cell.step)
            self._count_due_strays()
        elif cell.kind == "batch" and isinstance(value, Batch):
            self._observe_batch(cell.step, value)
        elif cell.kind == "checkpoint" and isinstance(value, Checkpoint):
            self._observe_floor(value)
        elif cell.kind == "critic_checkpoint" and isinstance(value, Checkpoint):
            self._critic_checkpoint = max(self._critic_checkpoint, value.version)
        elif cell.kind == "group" and cell.step >= self.floor and cell.field in _BITS:
            if not self._due(cell.row):
                self._store_stray(cell)
                return False
            self._observe_row(cell.row, cell.field)
            self._count_strays_from(self._successor(cell.row))
        return True

    def _successor(self, row: RowId) -> RowId:
        return replace(row, index=row.index + self.rows)

    def _due(self, row: RowId) -> bool:
        within = self.version is not None and row.step <= min(self.steps - 1, self.version + self.lead)
        if (not within and row.step not in self.batches) or row.index % self.rows >= self.rows_of(row.step):
            return False
        return row.index < self.rows or row.index - self.rows in self._ended.get(row.step, ())

    def rows_of(self, step: int) -> int:
        """Return how many rows a step trains."""
        return self._last if step == self.steps - 1 else self.rows

    def is_void(self, row: RowId) -> bool:
        """Whether a cell that is stored now never counts, because its row is far from due."""
        if row.step < self.floor or self._due(row):
            return False
        version = -1 if self.version is None else self.version
        last = min(self.steps - 1, version + self.lead + 1)
        return row.step > last or row.index >= self.rows * STRAY_REFILLS

    def _store_stray(self, cell: CellId) -> None:
        if not self.is_void(cell.row):
            rows = self._strays.setdefault(cell.step, {})
            rows[cell.index] = rows.get(cell.index, 0) | _BITS[cell.field]

    def _count_due_strays(self) -> None:
        """Count the stray cells of rows that have become due."""
        for step in sorted(self._strays):
            for index in range(self.rows):
                self._count_strays_from(RowId(step, index))

    def _count_strays_from(self, row: RowId) -> None:
        """Count the stray cells of a row and its successors, as far as these are due."""
        strays = self._strays.get(row.step, {})
        while row.index in strays and self._due(row):
            bits = strays.pop(row.index)
            for field, bit in _BITS.items():
                if bits & bit:
                    self._observe_row(row, field)
            row = self._successor(row)

    @property
    def furthest(self) -> int:
        """Last step with an admitted row; -1 if there is none."""
        return self._furthest

    def _observe_row(self, row: RowId, field: str) -> None:
        step = self._states.setdefault(row.step, {})
        self._furthest = max(self._furthest, row.step)
        if field == "prompt":
            step.setdefault(row.index, RowState.IN_FLIGHT)
            self._owed.pop(row, None)
        elif field in ("dropped", "quarantined"):
            self._owed.pop(row, None)
            # A row ends once: the first ending counts, and a trained row stays trained.
            if step.get(row.index, RowState.IN_FLIGHT) is RowState.IN_FLIGHT:
                step[row.index] = RowState(field)
            self._ended.setdefault(row.step, set()).add(row.index)
            successor = self._successor(row)
            if row.step not in self.batches and successor.index not in step:
                self._owed[successor] = None

    def _observe_batch(self, step: int, batch: Batch) -> None:
        if step in self.batches and self.batches[step] != batch:
            self._violations.append(f"step {step} has two batches")
        # The step is complete, so successors of its failed rows are no longer needed.
        for row in [row for row in self._owed if row.step == step]:
            del self._owed[row]
        self.batches[step] = batch
        if step < self.floor:
            return
        self._count_due_strays()
        states = self._states.setdefault(step, {})
        for index in batch.rows:
            if index not in states:
                # No violation if the floor rises above it later: then its prompt was purged before it was observed.
                self._unadmitted.add(RowId(step, index))
            # The batch decides: a row that was dropped or quarantined at the same time counts as trained.
            states[index] = RowState.TRAINED
        if len(set(batch.rows)) != len(batch.rows):
            self._violations.append(f"step {step} trains a row twice")

    def _observe_floor(self, checkpoint: Checkpoint) -> None:
        if checkpoint.floor >= self.floor:
            self.floor, self.totals = checkpoint.floor, checkpoint.totals
            for by_step in (self._states, self._ended, self._strays):
                for step in [s for s in by_step if s < self.floor]:
                    del by_step[step]
            self._unadmitted = {row for row in self._unadmitted if row.step >= self.floor}

    def state(self, row: RowId) -> RowState | None:
        """Return the state of a row of a step not below the floor; None if it was not admitted."""
        return self._states.get(row.step, {}).get(row.index)

    def to_admit(self) -> list[RowId]:
        """Return the rows to admit now, oldest first: owed successors and new rows within the lead."""
        if self.version is None:
            return []
        owed = [row for row in self._owed if row.step not in self.batches]
        last = min(self.steps - 1, self.version + self.lead)
        fresh = [
            RowId(step, index)
            for step in range(max(self.floor, self.version), last + 1)
            if step not in self.batches
            for index in range(self.rows_of(step))
            if index not in self._states.get(step, {})
        ]
        return sorted([*owed, *fresh])

    def surplus(self) -> list[RowId]:
        """Return the rows in flight that their step's batch does not name: they will not be trained."""
        return [row for row in self._in_flight() if row.step in self.batches]

    def candidates(self, step: int) -> dict[int, int]:
        """Return the newest row in flight of each slot of a step: slot -> index."""
        states = self._states.get(step, {})
        in_flight = sorted(index for index, state in states.items() if state is RowState.IN_FLIGHT)
        return {index % self.rows: index for index in in_flight}

    def next_floor(self, version: int) -> int:
        """Return the highest floor that a checkpoint of `version` may have.

        All rows of the steps below the floor must have ended, and a checkpoint of the critic, if the run has one, must
        cover them. PromptSource may have admitted a successor that this ledger has not observed. It admits a step only
        after it has read all cells that the step `lead + 1` before left behind. A step is therefore closed once a row
        `lead + 1` steps ahead of it has been admitted.
        """
        floor = self.floor
        open_steps = {row.step for row in self._in_flight()} | {row.step for row in self._owed}
        closed = min(version, self._furthest - self.lead, self._critic_checkpoint)
        while floor < closed and floor in self.batches and floor not in open_steps:
            floor += 1
        return floor

    def totals_below(self, floor: int) -> RowCounts:
        """Return the counts of all rows of the steps below `floor`."""
        counts = dict.fromkeys(RowState, 0)
        for step, states in self._states.items():
            if step < floor:
                for state in states.values():
                    counts[state] += 1
        return self._sum(counts)

    def account(self) -> Account:
        """Return the counts of all rows of the run, including those below the floor."""
        counts = dict.fromkeys(RowState, 0)
        for states in self._states.values():
            for state in states.values():
                counts[state] += 1
        total = self._sum(counts)
        return Account(total.admitted, total.trained, total.dropped, total.quarantined, counts[RowState.IN_FLIGHT])

    def violations(self) -> list[str]:
        """Return the violations of the invariant; a correct run has none."""
        account = self.account()
        ended = account.trained + account.dropped + account.quarantined
        violations = self._violations + [f"{row} was trained but never admitted" for row in sorted(self._unadmitted)]
        if account.admitted != ended + account.in_flight:
            violations.append(f"admitted {account.admitted} is not {ended} ended + {account.in_flight} in flight")
        checked = range(self._checked, self.version or 0)
        violations += [f"step {step} has weights but no batch" for step in checked if step not in self.batches]
        trained = self._trained_below + sum(len(b.rows) for step, b in self.batches.items() if step >= self._checked)
        if trained != account.trained:
            violations.append(f"batches name {trained} rows, {account.trained} are trained")
        return violations

    def _sum(self, counts: dict[RowState, int]) -> RowCounts:
        return RowCounts(
            admitted=self.totals.admitted + sum(counts.values()),
            trained=self.totals.trained + counts[RowState.TRAINED],
            dropped=self.totals.dropped + counts[RowState.DROPPED],
            quarantined=self.totals.quarantined + counts[RowState.QUARANTINED],
        )

    def _in_flight(self) -> Iterator[RowId]:
        for step, states in self._states.items():
            for index, state in states.items():
                if state is RowState.IN_FLIGHT:
                    yield RowId(step, index)


def ledger_of(config: Config | SavedSettings, *, has_critic: bool = False) -> Ledger:
    """Return the ledger of a run that has not begun; `has_critic` as of `Ledger`."""
    size, steps, rows = config.trainer.prompts_per_step, config.run.steps, config.run.rows
    last = size if rows is None else rows - (steps - 1) * size
    return Ledger(size, steps, config.staleness.max, has_critic=has_critic, last=last)

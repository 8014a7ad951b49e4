"""The ledger of a run: a pure state machine over the cells, in the order of the stream.

Law: `admitted = trained + dropped + quarantined + in flight` at every instant. A row that fails before its step's
batch is written is owed one successor, `rows` indices further on, so that every slot of a step is filled in the end.

A row is due once its step is within the lead and, for a successor, its predecessor has ended. Cells of rows that are
not due are strays: nobody asked for them, so they are kept aside and count only if the row becomes due.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from broker.subjects import CellId, RowId
from relax_actors.messages import Batch, Checkpoint, Totals


class RowState(StrEnum):
    """How far a row is."""

    IN_FLIGHT = "in_flight"
    TRAINED = "trained"
    DROPPED = "dropped"
    QUARANTINED = "quarantined"


# In the order in which they are counted when a row becomes due; other columns do not concern the ledger.
_BITS = {"prompt": 1, "dropped": 2, "quarantined": 4}


@dataclass(frozen=True, slots=True)
class Account:
    """Rows of the whole run by how they ended."""

    admitted: int
    trained: int
    dropped: int
    quarantined: int
    in_flight: int


class Ledger:
    """What became of every row.

    Args:
        rows: rows of a step.
        steps: steps of the run.
        lead: how many steps ahead of the trained version rows may be admitted.
    """

    def __init__(self, rows: int, steps: int, lead: int) -> None:
        self.rows, self.steps, self.lead = rows, steps, lead
        self.version: int | None = None
        self.floor = 0
        self.totals = Totals()
        self.batches: dict[int, Batch] = {}
        self._states: dict[int, dict[int, RowState]] = {}
        self._owed: dict[RowId, None] = {}
        self._furthest = -1
        self._ended: dict[int, set[int]] = {}
        self._aside: dict[int, dict[int, int]] = {}
        self._strangers: dict[RowId, str] = {}
        self._violations: list[str] = []

    def observe(self, cell: CellId, value: Batch | Checkpoint | None = None) -> bool:
        """Take in one cell; `value` is needed for `batch` and `checkpoint`. False if it is a stray."""
        if cell.kind == "weights":
            self.version = cell.step if self.version is None else max(self.version, cell.step)
            self._readmit()
        elif cell.kind == "batch" and isinstance(value, Batch):
            self._observe_batch(cell.step, value)
        elif cell.kind == "checkpoint" and isinstance(value, Checkpoint):
            self._observe_floor(value)
        elif cell.kind == "group" and cell.step >= self.floor and cell.field in _BITS:
            if not self._due(cell.row):
                self._set_aside(cell)
                return False
            self._observe_row(cell.row, cell.field)
            self._readmit_from(self._successor(cell.row))
        return True

    def _successor(self, row: RowId) -> RowId:
        return replace(row, index=row.index + self.rows)

    def _due(self, row: RowId) -> bool:
        within = self.version is not None and row.step <= min(self.steps - 1, self.version + self.lead)
        if not within and row.step not in self.batches:
            return False
        return row.index < self.rows or row.index - self.rows in self._ended.get(row.step, ())

    def _set_aside(self, cell: CellId) -> None:
        # A step beyond both bounds can never become due.
        if cell.step < self.steps or cell.step <= (self.version or 0) + self.lead:
            rows = self._aside.setdefault(cell.step, {})
            rows[cell.index] = rows.get(cell.index, 0) | _BITS[cell.field]

    def _readmit(self) -> None:
        """Count the cells that were kept aside of rows that have become due."""
        for step in sorted(self._aside):
            for index in range(self.rows):
                self._readmit_from(RowId(step, index))

    def _readmit_from(self, row: RowId) -> None:
        aside = self._aside.get(row.step, {})
        while row.index in aside and self._due(row):
            bits = aside.pop(row.index)
            for field, bit in _BITS.items():
                if bits & bit:
                    self._observe_row(row, field)
            row = self._successor(row)

    @property
    def furthest(self) -> int:
        """The last step that a row was admitted for, -1 if none was."""
        return self._furthest

    def _observe_row(self, row: RowId, field: str) -> None:
        step = self._states.setdefault(row.step, {})
        self._furthest = max(self._furthest, row.step)
        if field == "prompt":
            step.setdefault(row.index, RowState.IN_FLIGHT)
            self._owed.pop(row, None)
        elif field in ("dropped", "quarantined"):
            self._owed.pop(row, None)
            # A row ends once: what came first stands, and a trained row stays trained.
            if step.get(row.index, RowState.IN_FLIGHT) is RowState.IN_FLIGHT:
                step[row.index] = RowState(field)
            self._ended.setdefault(row.step, set()).add(row.index)
            successor = self._successor(row)
            if row.step not in self.batches and successor.index not in step:
                self._owed[successor] = None

    def _observe_batch(self, step: int, batch: Batch) -> None:
        if step in self.batches and self.batches[step] != batch:
            self._violations.append(f"step {step} has two batches")
        # The step is complete: whoever was to replace a failed row of it is no longer wanted.
        for row in [row for row in self._owed if row.step == step]:
            del self._owed[row]
        self.batches[step] = batch
        if step < self.floor:
            return
        self._readmit()
        states = self._states.setdefault(step, {})
        for index in batch.rows:
            state = states.get(index)
            if state is None:
                # Unless the floor covers it: then its prompt was purged before we read it.
                self._strangers[RowId(step, index)] = "was trained but never admitted"
            # A row that a role dropped or quarantined meanwhile is trained all the same: the batch decides.
            states[index] = RowState.TRAINED
        if len(set(batch.rows)) != len(batch.rows):
            self._violations.append(f"step {step} trains a row twice")

    def _observe_floor(self, checkpoint: Checkpoint) -> None:
        if checkpoint.floor >= self.floor:
            self.floor, self.totals = checkpoint.floor, checkpoint.totals
            for by_step in (self._states, self._ended, self._aside):
                for step in [s for s in by_step if s < self.floor]:
                    del by_step[step]
            self._strangers = {row: why for row, why in self._strangers.items() if row.step >= self.floor}

    def state(self, row: RowId) -> RowState | None:
        """State of a row above the floor; None if it was never admitted."""
        return self._states.get(row.step, {}).get(row.index)

    def to_admit(self) -> list[RowId]:
        """Rows that may and should be admitted now, oldest first: successors owed, and steps within the lead."""
        if self.version is None:
            return []
        owed = [row for row in self._owed if row.step not in self.batches]
        last = min(self.steps - 1, self.version + self.lead)
        fresh = [
            RowId(step, index)
            for step in range(max(self.floor, self.version), last + 1)
            if step not in self.batches
            for index in range(self.rows)
            if index not in self._states.get(step, {})
        ]
        return sorted([*owed, *fresh])

    def surplus(self) -> list[RowId]:
        """Rows in flight of steps whose batch does not name them: nobody will train them."""
        return [row for row in self._in_flight() if row.step in self.batches]

    def candidates(self, step: int) -> dict[int, int]:
        """Rows of a step that can still be trained: slot -> index of the newest row in the slot."""
        states = self._states.get(step, {})
        living = sorted(index for index, state in states.items() if state is RowState.IN_FLIGHT)
        return {index % self.rows: index for index in living}

    def next_floor(self, version: int) -> int:
        """The highest floor that a checkpoint of `version` allows: all rows of the steps below it are finished.

        PromptSource may have admitted a successor that we have not read yet. It admits a step only after it has read
        all that the step `lead + 1` before it left, so a step is closed once one that far ahead has been admitted.
        """
        floor = self.floor
        open_steps = {row.step for row in self._in_flight()} | {row.step for row in self._owed}
        closed = min(version, self._furthest - self.lead)
        while floor < closed and floor in self.batches and floor not in open_steps:
            floor += 1
        return floor

    def totals_below(self, floor: int) -> Totals:
        """Counts of all rows of the steps below `floor`."""
        counts = dict.fromkeys(RowState, 0)
        for step, states in self._states.items():
            if step < floor:
                for state in states.values():
                    counts[state] += 1
        return self._sum(counts)

    def account(self) -> Account:
        """Rows of the whole run, those below the floor included."""
        counts = dict.fromkeys(RowState, 0)
        for states in self._states.values():
            for state in states.values():
                counts[state] += 1
        total = self._sum(counts)
        return Account(total.admitted, total.trained, total.dropped, total.quarantined, counts[RowState.IN_FLIGHT])

    def violations(self) -> list[str]:
        """What breaks the law; empty in every run."""
        account = self.account()
        ended = account.trained + account.dropped + account.quarantined
        found = self._violations + [f"{row} {why}" for row, why in self._strangers.items()]
        if account.admitted != ended + account.in_flight:
            found.append(f"admitted {account.admitted} is not {ended} ended + {account.in_flight} in flight")
        found += [f"step {s} has weights but no batch" for s in range(self.version or 0) if s not in self.batches]
        trained = sum(len(batch.rows) for batch in self.batches.values())
        if trained != account.trained:
            found.append(f"batches name {trained} rows, {account.trained} are trained")
        return found

    def _sum(self, counts: dict[RowState, int]) -> Totals:
        return Totals(
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

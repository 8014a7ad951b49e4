"""The ledger as a state machine: its invariant holds for every order of cells and every restart."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.subjects import CellId, RowId
from relax_actors.training.ledger import Ledger, RowState
from tests.unit.test_ledger import ROWS, Entry, Value, batch, cell, checkpoint


class LedgerMachine(RuleBasedStateMachine):
    """A table, the ledger of PromptSource, which follows it at once, and the ledger of the trainer, which may lag.

    `stream` holds every cell ever written, `written` the subjects of those in the table, `purged` the positions of the
    others. A ledger learns of a version when it reads the cell, so that it judges strays by their position.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream: list[Entry] = []
        self.written: set[CellId] = set()
        self.purged: set[int] = set()
        self.published: list[int] = []
        self.ready: set[RowId] = set()
        self.trained: list[RowId] = []

    @initialize(steps=st.integers(1, 4), lead=st.integers(0, 2))
    def start(self, steps: int, lead: int) -> None:
        self.steps, self.lead = steps, lead
        self.source, self.trainer = Ledger(ROWS, steps, lead), Ledger(ROWS, steps, lead)
        self.read = 0
        self.publish()

    def publish(self) -> None:
        """Publish the next version as the trainer does, after the void cells of the step that becomes due are gone."""
        version = len(self.published)
        if version:
            self.purge(lambda c, at: c.step == version + self.lead and at < self.published[version - 1])
        self.write(CellId("weights", version))
        self.published.append(len(self.stream) - 1)

    def purge(self, gone: Callable[[CellId, int], bool]) -> None:
        for at, (cell_id, _) in enumerate(self.stream):
            if at not in self.purged and cell_id.kind == "group" and gone(cell_id, at):
                self.purged.add(at)
                self.written.discard(cell_id)

    def write(self, cell_id: CellId, value: Value = None) -> bool:
        """Write a cell unless it exists, as the server does, or is below the floor, as writers do."""
        if cell_id in self.written or (cell_id.kind == "group" and cell_id.step < self.source.floor):
            return False
        self.written.add(cell_id)
        self.stream.append((cell_id, value))
        self.source.observe(cell_id, value)
        return True

    def surviving(self) -> list[Entry]:
        return [entry for at, entry in enumerate(self.stream) if at not in self.purged]

    def fresh(self) -> Ledger:
        ledger = Ledger(ROWS, self.steps, self.lead)
        for cell_id, value in self.surviving():
            ledger.observe(cell_id, value)
        return ledger

    def rows(self, *states: RowState) -> list[RowId]:
        known = [cell_id.row for cell_id, _ in self.surviving() if cell_id.field in ("prompt", "quarantined")]
        return sorted({row for row in known if self.source.state(row) in states})

    def prompts(self) -> list[RowId]:
        """Return the rows that roles handle: all rows with a prompt, admitted or not."""
        return sorted({cell_id.row for cell_id, _ in self.surviving() if cell_id.field == "prompt"})

    def open_steps(self) -> range:
        version = self.source.version or 0
        return range(version, min(self.steps, version + self.lead + 1))

    @rule(count=st.integers(1, 6), bad=st.sets(st.integers(0, 5), max_size=1))
    def admit(self, count: int, bad: set[int]) -> None:
        for i, row in enumerate(self.source.to_admit()[:count]):
            cell_id = cell(row.step, row.index, "quarantined" if i in bad else "prompt")
            self.write(cell_id)  # refused if a void cell has the subject

    @rule(step=st.integers(0, 5), index=st.integers(0, 9), field=st.sampled_from(["prompt", "dropped", "quarantined"]))
    def write_stray(self, step: int, index: int, field: str) -> None:
        self.write(cell(step, index, field))

    @rule(step=st.integers(0, 3), chain=st.integers(1, 4))
    def write_chain_of_strays(self, step: int, chain: int) -> None:
        for i in reversed(range(chain)):
            self.write(cell(step, i * ROWS, "quarantined"))

    @rule(data=st.data(), field=st.sampled_from(["advantage", "advantage", "dropped"]))
    def finish_row(self, data: st.DataObject, field: str) -> None:
        unfinished = [row for row in self.prompts() if row not in self.ready]
        if unfinished:
            row = data.draw(st.sampled_from(unfinished))
            self.write(cell(row.step, row.index, field))
            if field == "advantage":
                self.ready.add(row)

    @rule()
    def finish_all_rows(self) -> None:
        for row in self.prompts():
            self.write(cell(row.step, row.index, "advantage"))
            self.ready.add(row)

    @rule(data=st.data())
    def quarantine_any_row(self, data: st.DataObject) -> None:
        rows = self.rows(RowState.IN_FLIGHT, RowState.TRAINED, RowState.DROPPED)
        if rows:
            row = data.draw(st.sampled_from(rows))
            self.write(cell(row.step, row.index, "quarantined"))

    @rule()
    def drop_surplus(self) -> None:
        for row in self.source.surplus():
            self.write(cell(row.step, row.index, "dropped"))

    @rule(data=st.data())
    def sweep(self, data: st.DataObject) -> None:
        """Remove void cells, all or those of one step, as the trainer does at any time."""
        first = (self.source.version or 0) + self.lead + 2
        only = data.draw(st.none() | st.integers(first, 9))
        self.purge(lambda c, _: c.step >= first and only in (None, c.step))

    @rule(data=st.data())
    def redeliver_cell(self, data: st.DataObject) -> None:
        # Consumers deliver in order; only a role's own cells are observed twice, and these are of due rows.
        cells = [
            entry
            for entry in self.surviving()
            if entry[0].kind in ("weights", "checkpoint")
            or (entry[0].kind == "group" and self.source.state(entry[0].row) is not None)
        ]
        self.source.observe(*data.draw(st.sampled_from(cells)))

    @rule(count=st.integers(1, 20))
    def trainer_reads(self, count: int) -> None:
        for at, (cell_id, value) in enumerate(self.stream[self.read : self.read + count], self.read):
            if at not in self.purged and not (cell_id.kind == "batch" and cell_id.step in self.trainer.batches):
                self.trainer.observe(cell_id, value)
        self.read = min(len(self.stream), self.read + count)

    def write_as_trainer(self, cell_id: CellId, value: Value = None) -> None:
        """Write a cell as the trainer, which observes its own cells before it reads them."""
        self.write(cell_id, value)
        self.trainer.observe(cell_id, value)

    def trainable(self) -> list[int] | None:
        version = len(self.published) - 1
        if version >= self.steps:
            return None
        candidates = self.trainer.candidates(version)
        rows = [candidates[slot] for slot in sorted(candidates)]
        return rows if len(rows) == ROWS and all(RowId(version, i) in self.ready for i in rows) else None

    @precondition(lambda self: self.trainable())
    @rule()
    def train(self) -> None:
        step, rows = len(self.published) - 1, self.trainable() or []
        self.trained += [RowId(step, index) for index in rows]
        self.write_as_trainer(CellId("batch", step), batch(*rows))
        self.publish()

    @precondition(lambda self: self.trainable())
    @rule(slot=st.integers(0, ROWS - 1))
    def trainer_drops_row(self, slot: int) -> None:
        step, rows = len(self.published) - 1, self.trainable() or []
        self.write_as_trainer(cell(step, rows[slot], "dropped"))

    @rule(keep=st.integers(0, 4))
    def checkpoint(self, keep: int) -> None:
        """Raise the floor; an interrupted purge leaves the last `keep` cells below it."""
        version = len(self.published) - 1
        if CellId("checkpoint", version) in self.written:
            return
        floor = self.trainer.next_floor(version)
        value = checkpoint(version, floor, self.trainer.totals_below(floor))
        self.write_as_trainer(CellId("checkpoint", version), value)
        below = [at for at, (c, _) in enumerate(self.stream) if c.step < floor and c.field not in ("", "quarantined")]
        gone = set(below[: len(below) - keep])
        self.purge(lambda _, at: at in gone)

    @rule()
    def source_restarts(self) -> None:
        self.source = self.fresh()

    @rule()
    def trainer_restarts(self) -> None:
        self.trainer, self.read = self.fresh(), len(self.stream)

    @invariant()
    def ledger_balances(self) -> None:
        assert self.source.violations() == []
        account = self.source.account()
        assert account.admitted == account.trained + account.dropped + account.quarantined + account.in_flight

    @invariant()
    def no_row_is_trained_twice_or_lost(self) -> None:
        assert len(set(self.trained)) == len(self.trained) == self.source.account().trained

    @invariant()
    def restarted_ledger_is_equal(self) -> None:
        fresh = self.fresh()
        assert fresh.violations() == []
        assert fresh.account() == self.source.account()
        assert fresh.to_admit() == self.source.to_admit()
        assert fresh.surplus() == self.source.surplus()
        assert fresh.floor == self.source.floor

    @invariant()
    def every_slot_of_an_open_step_has_a_candidate_or_is_owed_one(self) -> None:
        owed = self.source.to_admit()
        for step in self.open_steps():
            if step not in self.source.batches:
                filled = set(self.source.candidates(step)) | {row.index % ROWS for row in owed if row.step == step}
                assert filled == set(range(ROWS))

    @invariant()
    def no_slow_row_is_passed_over(self) -> None:
        """A row's successor is trained only after the row has ended."""
        ever_written = {cell_id for cell_id, _ in self.stream}
        for step, value in self.source.batches.items():
            for i in (i for index in value.rows for i in range(index % ROWS, index, ROWS)):
                assert {cell(step, i, "dropped"), cell(step, i, "quarantined")} & ever_written

    @invariant()
    def admitted_rows_are_within_the_lead(self) -> None:
        assert all(row.step in self.open_steps() for row in self.source.to_admit())

    def teardown(self) -> None:
        """Check that a run with progress reaches its last step, and that its floor follows at the allowed distance."""
        for _ in range(2 * self.steps + 2):
            self.admit(100, set())
            self.finish_all_rows()
            self.trainer_reads(len(self.stream))
            if self.trainable():
                self.train()
            self.drop_surplus()
        assert self.source.version == self.steps
        self.ledger_balances()
        self.no_row_is_trained_twice_or_lost()
        self.restarted_ledger_is_equal()
        assert self.source.account().in_flight == 0
        assert self.source.account().trained == ROWS * self.steps
        assert self.fresh().next_floor(self.steps) >= self.steps - 1 - self.lead


LedgerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase

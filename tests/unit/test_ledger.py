"""Ledger: its invariant holds for every order of cells and for every restart."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.subjects import CellId, RowId
from relax_actors.messages import Batch, Checkpoint, RowCounts
from relax_actors.training.ledger import STRAY_REFILLS, Account, Ledger, RowState

ROWS = 2
Value = Batch | Checkpoint | None
Entry = tuple[CellId, Value]


def batch(*rows: int) -> Batch:
    return Batch(list(rows), 0, 1, 0.0, 0, 0, 0.0)


def cell(step: int, index: int, field: str) -> CellId:
    return CellId("group", step, index, field)


def checkpoint(version: int, floor: int, totals: RowCounts) -> Checkpoint:
    return Checkpoint(version, "", "", floor, totals)


def started(steps: int = 3, lead: int = 1, rows: int = ROWS) -> Ledger:
    ledger = Ledger(rows, steps, lead)
    ledger.observe(CellId("weights", 0))
    return ledger


def admit_all(ledger: Ledger) -> list[RowId]:
    rows = ledger.to_admit()
    for row in rows:
        ledger.observe(cell(row.step, row.index, "prompt"))
    return rows


def test_no_row_is_admitted_before_the_first_weights() -> None:
    assert Ledger(ROWS, 3, 1).to_admit() == []


def test_rows_are_admitted_oldest_first_within_the_lead() -> None:
    ledger = started(steps=3, lead=1)
    assert admit_all(ledger) == [RowId(0, 0), RowId(0, 1), RowId(1, 0), RowId(1, 1)]
    assert ledger.to_admit() == []
    ledger.observe(CellId("weights", 1))
    assert ledger.to_admit() == [RowId(2, 0), RowId(2, 1)]


def test_no_row_is_admitted_beyond_the_last_step() -> None:
    ledger = started(steps=1, lead=9)
    assert admit_all(ledger) == [RowId(0, 0), RowId(0, 1)]
    ledger.observe(CellId("batch", 0), batch(0, 1))
    ledger.observe(CellId("weights", 1))
    assert ledger.to_admit() == []


def test_last_step_has_the_rows_that_remain() -> None:
    ledger = Ledger(ROWS, 2, 1, last=1)
    ledger.observe(CellId("weights", 0))
    assert [ledger.rows_of(step) for step in range(2)] == [2, 1]
    assert admit_all(ledger) == [RowId(0, 0), RowId(0, 1), RowId(1, 0)]
    assert not ledger.observe(cell(1, 1, "prompt"))  # a stray
    ledger.observe(cell(1, 0, "quarantined"))
    assert ledger.to_admit() == [RowId(1, ROWS)]


def test_failed_row_is_owed_one_successor_in_its_slot() -> None:
    ledger = started(lead=0)
    admit_all(ledger)
    ledger.observe(cell(0, 1, "dropped"))
    assert ledger.candidates(0) == {0: 0}
    assert ledger.to_admit() == [RowId(0, 1 + ROWS)]
    admit_all(ledger)
    ledger.observe(cell(0, 1 + ROWS, "quarantined"))
    assert ledger.to_admit() == [RowId(0, 1 + 2 * ROWS)]
    admit_all(ledger)
    assert ledger.candidates(0) == {0: 0, 1: 1 + 2 * ROWS}
    assert ledger.account() == Account(admitted=4, trained=0, dropped=1, quarantined=1, in_flight=2)


def test_row_quarantined_at_admission_counts_and_is_owed_a_successor() -> None:
    ledger = started(lead=0)
    ledger.observe(cell(0, 0, "quarantined"))
    assert ledger.account() == Account(1, 0, 0, 1, 0)
    assert ledger.to_admit() == [RowId(0, 1), RowId(0, ROWS)]


def test_row_ends_once() -> None:
    ledger = started(lead=0)
    admit_all(ledger)
    ledger.observe(cell(0, 0, "dropped"))
    ledger.observe(cell(0, 0, "quarantined"))
    assert ledger.state(RowId(0, 0)) is RowState.DROPPED
    assert ledger.to_admit() == [RowId(0, ROWS)]
    assert ledger.account() == Account(2, 0, 1, 0, 1)


def test_trained_row_stays_trained_and_is_owed_no_successor() -> None:
    ledger = started(steps=1, lead=0)
    admit_all(ledger)
    ledger.observe(CellId("batch", 0), batch(0, 1))
    ledger.observe(cell(0, 0, "quarantined"))
    assert ledger.state(RowId(0, 0)) is RowState.TRAINED
    assert ledger.to_admit() == []
    assert ledger.violations() == []


def test_row_not_named_by_its_batch_is_surplus_until_dropped() -> None:
    ledger = started(steps=2, lead=0)
    admit_all(ledger)
    ledger.observe(cell(0, 1, "quarantined"))
    admit_all(ledger)
    ledger.observe(cell(0, 3, "quarantined"))  # the trainer has not read this cell and trains the row
    assert admit_all(ledger) == [RowId(0, 5)]
    ledger.observe(CellId("batch", 0), batch(0, 3))
    ledger.observe(CellId("weights", 1))
    admit_all(ledger)
    assert ledger.surplus() == [RowId(0, 5)]
    assert ledger.next_floor(1) == 0
    ledger.observe(cell(0, 5, "dropped"))
    assert ledger.surplus() == []
    assert ledger.to_admit() == []
    assert ledger.next_floor(1) == 1


def test_checkpoint_folds_finished_steps_into_totals() -> None:
    ledger = started(steps=2, lead=0)
    admit_all(ledger)
    ledger.observe(cell(0, 0, "dropped"))
    admit_all(ledger)
    ledger.observe(CellId("batch", 0), batch(2, 1))
    ledger.observe(CellId("weights", 1))
    admit_all(ledger)
    before = ledger.account()
    assert ledger.next_floor(1) == 1
    assert ledger.next_floor(0) == 0
    totals = ledger.totals_below(1)
    assert totals == RowCounts(admitted=3, trained=2, dropped=1)
    ledger.observe(CellId("checkpoint", 1), checkpoint(1, 1, totals))
    assert ledger.account() == before
    assert ledger.state(RowId(0, 1)) is None
    assert ledger.violations() == []


def test_floor_never_falls_and_cells_below_it_are_not_counted() -> None:
    ledger = started()
    ledger.observe(CellId("batch", 0), batch(0, 1))
    ledger.observe(CellId("checkpoint", 2), checkpoint(2, 1, RowCounts(2, 2)))
    ledger.observe(CellId("checkpoint", 1), checkpoint(1, 0, RowCounts()))
    ledger.observe(cell(0, 1, "quarantined"))
    assert ledger.floor == 1
    assert ledger.account() == Account(2, 2, 0, 0, 0)
    assert ledger.violations() == []


def test_batch_with_purged_prompts_is_no_violation_once_the_floor_is_observed() -> None:
    ledger = Ledger(ROWS, 3, 0)
    ledger.observe(CellId("batch", 0), batch(0, 1))
    assert ledger.violations() == [
        "group.0.0 was trained but never admitted",
        "group.0.1 was trained but never admitted",
    ]
    ledger.observe(CellId("checkpoint", 1), checkpoint(1, 1, RowCounts(2, 2)))
    assert ledger.violations() == []


def test_violations_are_named() -> None:
    ledger = started(steps=2, lead=1)
    admit_all(ledger)
    ledger.observe(cell(0, 0, "dropped"))
    ledger.observe(CellId("batch", 0), batch(0, 1))
    assert ledger.violations() == []  # the batch decides: the row counts once, as trained
    assert (ledger.account().trained, ledger.account().dropped) == (2, 0)
    twice = started(lead=0)
    admit_all(twice)
    twice.observe(CellId("batch", 0), batch(0, 0))
    assert "step 0 trains a row twice" in twice.violations()


def test_cells_of_rows_that_are_not_due_are_not_counted() -> None:
    ledger = started(steps=3, lead=1)
    strays = [cell(0, ROWS, "prompt"), cell(2, 0, "prompt"), cell(3, 0, "dropped"), cell(10**17, 10**17, "quarantined")]
    assert not any(ledger.observe(stray) for stray in strays)
    assert ledger.account() == Account(0, 0, 0, 0, 0)
    assert admit_all(ledger) == [RowId(0, 0), RowId(0, 1), RowId(1, 0), RowId(1, 1)]
    ledger.observe(CellId("batch", 0), batch(0, 1))
    assert ledger.next_floor(1) == 0  # only step 1 is admitted, within the lead of step 0


def test_stray_cell_counts_once_its_row_is_due() -> None:
    ledger = started(steps=2, lead=0)
    ledger.observe(cell(1, 0, "quarantined"))
    ledger.observe(cell(1, ROWS, "prompt"))
    admit_all(ledger)
    ledger.observe(CellId("batch", 0), batch(0, 1))
    ledger.observe(CellId("weights", 1))
    assert ledger.state(RowId(1, 0)) is RowState.QUARANTINED
    assert ledger.state(RowId(1, ROWS)) is RowState.IN_FLIGHT
    assert ledger.to_admit() == [RowId(1, 1)]
    assert ledger.violations() == []


def test_chain_of_strays_is_followed_to_its_end() -> None:
    ledger = started(steps=2, lead=0)
    for index in range(ROWS, 4000 * ROWS, ROWS):
        ledger.observe(cell(0, index, "quarantined"))
    ledger.observe(cell(0, 0, "dropped"))
    assert ledger.account().quarantined == STRAY_REFILLS - 1
    assert ledger.to_admit() == [RowId(0, 1), RowId(0, STRAY_REFILLS * ROWS)]


def test_strays_far_from_due_are_void_in_every_ledger_that_reads_them_in_order() -> None:
    ledger = started(steps=5, lead=1)
    far = [cell(3, 0, "dropped"), cell(5, 0, "prompt"), cell(0, STRAY_REFILLS * ROWS, "quarantined")]
    near = [cell(2, 0, "dropped"), cell(1, ROWS, "prompt")]
    assert [ledger.is_void(c.row) for c in far + near] == [True] * 3 + [False] * 2
    for stray in far:
        ledger.observe(stray)
    admit_all(ledger)
    for step in range(3):
        ledger.observe(CellId("batch", step), batch(0, 1))
        ledger.observe(CellId("weights", step + 1))
        admit_all(ledger)
    assert ledger.account().dropped == 0
    assert ledger.state(RowId(3, 0)) is RowState.IN_FLIGHT


def test_unknown_cells_are_ignored() -> None:
    ledger = started()
    for other in (CellId("unknown", 0), CellId("eval", 0, 0, "dropped"), CellId("batch", 0), CellId("checkpoint", 0)):
        ledger.observe(other)
    assert ledger.account() == Account(0, 0, 0, 0, 0)
    assert ledger.batches == {}


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

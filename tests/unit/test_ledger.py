"""Ledger: its invariant holds for every order of cells and for every restart."""

from __future__ import annotations

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

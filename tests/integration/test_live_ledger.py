"""The ledger can be read while rows are written and purged."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from broker.subjects import CellId
from broker.table import Table
from relax_actors.config import load_config
from relax_actors.messages import Batch, Checkpoint, Prompt, Weights
from relax_actors.monitoring.summary import read_ledger
from relax_actors.training.ledger import Ledger
from tests.support.running import TINY

ROWS, LEAD, STEPS = 4, 1, 120


class Writer(threading.Thread):
    """Writes the cells of a run as fast as possible and raises the floor every third step."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table, self.ledger, self.steps = table, Ledger(ROWS, STEPS, LEAD), 0
        self.start_run()

    def put(self, kind: str, n: int, value: Batch | Checkpoint | Weights) -> None:
        self.table.put(self.table.subjects.numbered(kind, n), value)
        self.ledger.observe(CellId(kind, n), None if isinstance(value, Weights) else value)

    def start_run(self) -> None:
        self.put("weights", 0, Weights(0, "f", [], 1))
        self.admit()

    def admit(self) -> None:
        prompt = Prompt("a", np.array([1], np.int32), "", {}, 0, 0)
        for row in self.ledger.to_admit():
            self.table.put(self.table.subject(row, "prompt"), prompt)
            self.ledger.observe(CellId("group", row.step, row.index, "prompt"))

    def run(self) -> None:
        for step in range(STEPS):
            self.put("batch", step, Batch(list(range(ROWS)), 0, 1, 0.0, 0, 0, 0.0))
            self.put("weights", step + 1, Weights(step + 1, "f", [], 1))
            self.admit()
            self.steps = step + 1
            if step % 3 == 2:
                old, floor = self.ledger.floor, self.ledger.next_floor(step + 1)
                self.put(
                    "checkpoint", step + 1, Checkpoint(step + 1, "p", "f", floor, self.ledger.totals_below(floor), 1)
                )
                prefix = self.table.subjects.prefix
                self.table.purge(f"{prefix}.group.{step}.>" for step in range(old, floor))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_rows_purged_during_a_read_are_not_reported_as_lost(table: Table) -> None:
    config = load_config(TINY, [f"run.steps={STEPS}", f"staleness.max={LEAD}"])
    writer = Writer(table)
    writer.start()
    reads = 0
    while writer.is_alive():
        ledger = read_ledger(table, config)
        assert ledger.violations() == [], f"read {reads}, at step {writer.steps}"
        reads += 1
    writer.join()
    assert reads > 5
    account = read_ledger(table, config).account()
    assert (account.trained, account.in_flight) == (ROWS * STEPS, 0)

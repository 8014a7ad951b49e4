"""What the console remembers of a run: dropped rows by reason, bounded by the floor as the table is."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from broker.codec import encode
from broker.subjects import RowId, Subjects
from broker.table_reader import Cell
from relax_actors.config import load_config
from relax_actors.config.saved import SavedSettings
from relax_actors.console.picture import Picture
from relax_actors.messages import Batch, Checkpoint, Dropped, Prompt, Weights
from relax_actors.messages.cells import RowCounts
from tests.support.running import TINY

ROWS = 4
SUBJECTS = Subjects("seen")


class Fed:
    """A picture that is fed with cells of a run."""

    def __init__(self, folder: Path) -> None:
        settings = ["run.name=seen", f"run.folder={folder}", f"trainer.prompts_per_step={ROWS}", "run.steps=50"]
        config = load_config(TINY, settings)
        self.picture = Picture(SavedSettings(config.model_dump(mode="json")))
        self._sequence = count(1)
        self.put(SUBJECTS.numbered("weights", 0), Weights(0, "f0", [], 1))

    def put(self, subject: str, value: Any) -> None:
        numbered = isinstance(value, Batch | Checkpoint | Weights)
        data = encode(value, "test.0#1", subject=subject if numbered else None)
        self.picture.take_cell(Cell(subject, next(self._sequence), data, 1.0))

    def row(self, row: RowId) -> None:
        tokens = np.arange(3, dtype=np.int32)
        prompt = Prompt(text="1+1=", tokens=tokens, answer="2", metadata={}, seed=1, min_version=row.step)
        self.put(SUBJECTS.cell(row, "prompt"), prompt)

    def step(self, step: int) -> None:
        """Admit and train a step, two rows of which were dropped and replaced."""
        for index in range(ROWS):
            self.row(RowId(step, index))
        for index, reason in ((0, "no_signal"), (1, "too_old")):
            self.put(SUBJECTS.cell(RowId(step, index), "dropped"), Dropped(reason, ""))
            self.row(RowId(step, index + ROWS))
        self.put(SUBJECTS.numbered("batch", step), Batch([ROWS, ROWS + 1, 2, 3], 1, 1, 0.5, 0, 8, 1e9 + step))
        self.put(SUBJECTS.numbered("weights", step + 1), Weights(step + 1, f"f{step + 1}", [], 1))


def test_dropped_rows_are_counted_as_the_ledger_counts_them(tmp_path: Path) -> None:
    fed = Fed(tmp_path)
    for step in range(5):
        fed.step(step)
        assert fed.picture.dropped() == {"no_signal": step + 1, "too_old": step + 1}
        assert fed.picture.dropped().total() == fed.picture.ledger.account().dropped
    # A row that is trained all the same counts as trained, and rows of an evaluation are not rows of a step.
    fed.put(SUBJECTS.cell(RowId(4, 2), "dropped"), Dropped("surplus", ""))
    fed.put(SUBJECTS.cell(RowId(4, 0, "eval"), "dropped"), Dropped("too_old", ""))
    assert fed.picture.dropped() == {"no_signal": 5, "too_old": 5}


def test_dropped_rows_below_the_floor_are_forgotten(tmp_path: Path) -> None:
    fed = Fed(tmp_path)
    for step in range(5):
        fed.step(step)
    totals = RowCounts(admitted=3 * 6, trained=3 * 4, dropped=3 * 2)
    fed.put(SUBJECTS.numbered("checkpoint", 5), Checkpoint(5, "checkpoints/5", "f5", 3, totals))
    assert fed.picture.dropped() == {"no_signal": 2, "too_old": 2}
    fed.put(SUBJECTS.cell(RowId(1, 2), "dropped"), Dropped("late", ""))
    assert fed.picture.dropped() == {"no_signal": 2, "too_old": 2}
    account = fed.picture.ledger.account()
    assert account.dropped == fed.picture.dropped().total() + fed.picture.ledger.totals.dropped == 10

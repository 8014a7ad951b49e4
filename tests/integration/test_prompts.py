"""PromptSource and Rollout on a real server: requeued rows, refilled slots, and weight versions that are gone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from broker.errors import StoreError
from broker.subjects import CellId, RowId
from broker.table import Cell, Table
from relax_actors.errors import AllRowsFailedError, ConfigError
from relax_actors.messages import Prompt, Quarantined, Readmitted, Requeued, Trajectory, Weights
from relax_actors.roles.evaluator import Evaluator
from relax_actors.roles.prompts import PromptSource
from relax_actors.roles.rollout import Rollout
from relax_actors.runtime import Row
from tests.support.contexts import MakeContext, MakeTrainer
from tests.support.messages import assert_says

ROWS = 4
MakeSource = Callable[..., PromptSource]


@pytest.fixture
def make_source(table: Table, make_context: MakeContext) -> MakeSource:
    """Return a function that makes an incarnation of PromptSource, recovered from the table."""

    def make(*settings: str, incarnation: int = 1) -> PromptSource:
        source = PromptSource()
        source.context = make_context("prompts", *settings, incarnation=incarnation)
        source.setup()
        source.recover(snapshot(table, source))
        return source

    return make


def snapshot(table: Table, source: PromptSource) -> list[tuple[CellId, Cell]]:
    return table.snapshot(source.follows(source.context.config))


def publish(table: Table, version: int) -> None:
    table.put(table.subjects.numbered("weights", version), Weights(version, "f", [], 1))


def quarantine(table: Table, source: PromptSource, row: RowId, *, requeue: bool = False) -> None:
    table.put(table.subject(row, "quarantined"), Quarantined("reward", 3, "on purpose", ""))
    if requeue:
        table.put(table.subject(row, "requeued"), Requeued(0.0))
    source.on_cells(snapshot(table, source))


def prompt(table: Table, row: RowId) -> Prompt:
    found = table.fetch(table.subject(row, "prompt"), Prompt)
    assert found is not None
    return found


def test_task_requeued_twice_stays_the_same_task(make_source: MakeSource, table: Table) -> None:
    publish(table, 0)
    source = make_source()
    first = RowId(0, 1)
    quarantine(table, source, first, requeue=True)
    second = RowId(0, 1 + ROWS)
    assert prompt(table, second).requeue_of == str(first)
    source = make_source(incarnation=2)  # rebuilds its state from the table alone
    quarantine(table, source, second, requeue=True)
    third = RowId(0, 1 + 2 * ROWS)
    assert prompt(table, third).requeue_of == str(second)
    assert prompt(table, first).text == prompt(table, second).text == prompt(table, third).text
    for old, new in ((first, second), (second, third)):
        assert table.fetch(table.subject(old, "readmitted"), Readmitted) == Readmitted(str(new))


def test_slot_refilled_too_often_ends_the_run_with_the_last_reason(make_source: MakeSource, table: Table) -> None:
    publish(table, 0)
    source = make_source("prompts.max_refills=2")
    for index in (2, 2 + ROWS):
        quarantine(table, source, RowId(0, index))
    with pytest.raises(ConfigError, match=r"group\.0\.10 .*quarantined by reward: on purpose"):
        quarantine(table, source, RowId(0, 2 + 2 * ROWS))


def test_refills_of_an_earlier_attempt_do_not_count(make_source: MakeSource, table: Table) -> None:
    publish(table, 0)
    source = make_source("prompts.max_refills=2")
    for index in (2, 2 + ROWS):
        quarantine(table, source, RowId(0, index))
    with pytest.raises(ConfigError):
        quarantine(table, source, RowId(0, 2 + 2 * ROWS))
    resumed = make_source("prompts.max_refills=2", incarnation=2)
    assert prompt(table, RowId(0, 2 + 3 * ROWS)).text
    quarantine(table, resumed, RowId(0, 2 + 3 * ROWS))
    with pytest.raises(ConfigError, match=r"step 0 was refilled 2 times.*group\.0\.18"):
        quarantine(table, resumed, RowId(0, 2 + 4 * ROWS))


def test_prompts_that_all_fail_for_one_reason_stop_the_run(make_source: MakeSource, table: Table) -> None:
    publish(table, 0)
    stray = "data.function=tiny_tasks.outside_the_alphabet"
    with pytest.raises(AllRowsFailedError) as caught:
        make_source(stray, "prompts.max_refills=1000")
    headline = str(caught.value).split("\n", 1)[0]
    assert_says(headline, "the first 64 rows of role prompts", "same error")


@pytest.mark.parametrize(("first", "stops"), [("1x2>", True), ("12>", False)])
def test_held_out_prompts_that_all_fail_for_one_reason_stop_the_run(
    make_context: MakeContext, table: Table, tmp_path: Path, first: str, *, stops: bool
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in (first, "3y>", "4z>")))
    evaluator = Evaluator()
    settings = ("eval.rows=8", "eval.data.kind=jsonl", f"eval.data.path={tasks}")
    evaluator.context = make_context("evaluator", *settings)
    evaluator.setup()
    publish(table, 0)
    fails = pytest.raises(AllRowsFailedError, match=r"^the first 3 held-out rows")
    ends: AbstractContextManager[object] = fails if stops else nullcontext()
    with ends:
        evaluator.recover(table.snapshot(evaluator.follows(evaluator.context.config)))
    assert table.count_cells(table.subjects.column("quarantined", "eval")) == (3 if stops else 2)


def test_row_with_a_version_that_is_gone_gets_an_error_and_no_other_version(
    make_trainer: MakeTrainer, make_context: MakeContext, table: Table
) -> None:
    make_trainer()
    rollout = Rollout()
    rollout.context = make_context("rollout")
    rollout.setup()
    try:
        tokens = np.array([1, 2, 10], np.int32)
        exact = Prompt("12>", tokens, "", {}, 1, 3, exact_version=True, greedy=True)
        rows = []
        for index, request in enumerate((exact, Prompt("12>", tokens, "", {}, 2, 0))):
            row = RowId(0, index, "eval")
            table.put(table.subject(row, "prompt"), request)
            rows.append(Row(row, {"prompt": table.get(table.subject(row, "prompt")).data}, table.store))
        gone, found = rollout.handle_many(rows)
    finally:
        rollout.close()
    assert isinstance(gone, StoreError)
    assert str(gone) == "weights 3 are gone"
    assert isinstance(found, Trajectory)
    assert set(found.versions.tolist()) == {0}


def test_a_row_with_an_unknown_letter_is_quarantined_with_its_line(
    make_source: MakeSource, table: Table, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "1x2>"}\n{"prompt": "12>"}\n')
    publish(table, 0)
    make_source("data.kind=jsonl", f"data.path={tasks}", "data.size=2")
    ids = [cell.row for cell in table.list_cells(table.subjects.column("quarantined"))]
    assert ids
    for row in ids:
        quarantined = table.fetch(table.subject(row, "quarantined"), Quarantined)
        assert quarantined is not None
        assert_says(quarantined.error, f"{tasks} line 1", "'x' at position 2", "model.tokenizer.alphabet")

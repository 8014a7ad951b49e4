"""Held-out rows of an evaluation whose settings change while it is unfinished."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from broker.subjects import RowId
from broker.table import Table
from relax_actors.evaluation.records import read_evaluation
from relax_actors.messages import Evaluation, Prompt, Reward, Weights
from relax_actors.roles.evaluator import Evaluator
from tests.support.contexts import MakeContext

SOURCE = ("eval.data.kind=python", "eval.data.function=tiny_tasks.make", "eval.data.size=8")
Resume = Callable[..., Evaluator]


@pytest.fixture
def resume(make_context: MakeContext, table: Table) -> Resume:
    """Return a function that makes an incarnation of the evaluator, recovered from the table."""
    table.put(table.subjects.numbered("weights", 0), Weights(0, "f", [], 1))

    def make(*settings: str, incarnation: int = 1) -> Evaluator:
        evaluator = Evaluator()
        evaluator.context = make_context("evaluator", *SOURCE, *settings, incarnation=incarnation)
        evaluator.setup()
        follow(evaluator)
        return evaluator

    return make


def follow(evaluator: Evaluator) -> None:
    table = evaluator.context.table
    evaluator.recover(table.snapshot(evaluator.follows(evaluator.context.config)))


def reward(table: Table, *indices: int) -> None:
    for index in indices:
        table.put(table.subject(RowId(0, index, "eval"), "reward"), Reward(np.ones(1, np.float32)))


def prompt(table: Table, index: int) -> Prompt:
    found = table.fetch(table.subject(RowId(0, index, "eval"), "prompt"), Prompt)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("settings", "counted"),
    [
        (("eval.sets.new.rows=1", "eval.sets.sums.rows=2"), {"new": 0, "sums": 1}),
        (("eval.sets.sums.rows=3",), {"sums": 3}),
        (("eval.sets.sums.rows=3", "eval.sets.sums.reward=numeric_match"), {"sums": 1}),
        (("eval.sets.sums.rows=3", "eval.sets.sums.passes=0.5"), {"sums": 3}),
    ],
)
def test_rows_of_another_set_or_other_settings_count_in_no_figure(
    resume: Resume, table: Table, settings: tuple[str, ...], counted: dict[str, int]
) -> None:
    resume("eval.sets.sums.rows=2")
    reward(table, 0, 1)
    changed = resume(*settings, incarnation=2)
    reward(table, 2)
    follow(changed)
    result = table.fetch(table.subjects.numbered("evaluation", 0), Evaluation)
    assert result is not None
    assert {name: each.rows for name, each in result.sets.items()} == counted
    records = read_evaluation(changed.context.folder.evaluation(0)).records
    left_out = [record for record in records if not record.answers]
    assert len(left_out) == 3 - sum(counted.values())
    assert all("[eval] was changed while the version was evaluated" in record.problem for record in left_out)


def test_seeds_of_a_set_do_not_depend_on_those_beside_it(resume: Resume, table: Table) -> None:
    resume("eval.rows=2")
    alone = [prompt(table, index).seed for index in range(2)]
    table.purge([f"{table.subjects.prefix}.eval.>"])
    resume("eval.sets.other.rows=3", "eval.sets.held_out.rows=2", incarnation=2)
    assert [prompt(table, index).seed for index in range(3, 5)] == alone

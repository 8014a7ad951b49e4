"""Rows of the data with scores: the tokens that they are read at, and the rows that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.errors import RowError
from relax_actors.messages import Trajectory
from tests.support.chat_templates import SMOLLM2
from tests.unit.data.test_rows_of_data import Made


def scored(made: Made, row: Trajectory) -> list[tuple[str, float]]:
    """Text up to each place where a score is read, and what the score is compared with."""
    assert row.targets is not None
    found, begin = [], 0
    for length in row.lengths.tolist():
        own = slice(begin, begin + length)
        for place in np.flatnonzero(row.trained[own]).tolist():
            ids = [*row.prompt_tokens.tolist(), *row.token_ids[own][: place + 1].tolist()]
            text = str(made.tokenizer.inner.decode(ids, skip_special_tokens=False))
            found.append((text, float(row.targets[own][place])))
        begin += length
    return found


PAIR_SCORES = ("algorithm.name=reward_model", "data.chat=false")


def test_scores_of_a_pair_are_read_at_the_stop_tokens(tmp_path: Path) -> None:
    made = Made(tmp_path, *PAIR_SCORES)
    row = made.row("1 + 1 =", chosen=" 2", rejected=" 11")
    assert scored(made, row) == [("1 + 1 = 2<|im_end|>", 0.0), ("1 + 1 = 11<|im_end|>", 0.0)]
    assert row.texts == [" 2", " 11"]
    assert scored(made, made.row("1", chosen="2", rejected="3", margin=0.5))[0][1] == 0.5
    assert scored(made, made.row("1", chosen="2", rejected="3", margin=None))[0][1] == 0.0


def test_scores_in_a_chat_are_read_where_generation_ends(tmp_path: Path) -> None:
    made = Made(tmp_path, "algorithm.name=outcome_reward")
    ((text, label),) = scored(made, made.row("one", "two", label=True))
    assert text.endswith("<|im_start|>assistant\ntwo<|im_end|>")
    assert label == 1.0


def test_score_of_a_cut_answer_is_read_at_its_last_token(tmp_path: Path) -> None:
    made = Made(tmp_path, *PAIR_SCORES, "data.oversize=truncate_right", context=8)
    row = made.row("1234", chosen="56789", rejected="5")
    assert [text for text, _ in scored(made, row)] == ["12345678", "12345<|im_end|>"]


@pytest.mark.parametrize("margin", ["0.5", True, float("nan"), float("inf"), [1.0]])
def test_margin_that_is_no_number_is_refused(tmp_path: Path, margin: object) -> None:
    with pytest.raises(RowError, match="margin"):
        Made(tmp_path, *PAIR_SCORES).row("1", chosen="2", rejected="3", margin=margin)


@pytest.mark.parametrize(("label", "classes"), [(2, 1), (-1, 3), (3, 3), ("good", 2), (None, 2), (0.5, 2)])
def test_label_outside_the_classes_is_refused(tmp_path: Path, label: object, classes: int) -> None:
    made = Made(tmp_path, "algorithm.name=outcome_reward", f"algorithm.scores.classes={classes}")
    with pytest.raises(RowError, match=r"'label'.*algorithm\.scores\.classes"):
        made.row("one", "two", label=label)


def test_pair_of_equal_answers_has_no_scores(tmp_path: Path) -> None:
    made = Made(tmp_path, *PAIR_SCORES)
    with pytest.raises(RowError, match="the same"):
        made.row("1", chosen="2", rejected="2")


STEP_SCORES = ("algorithm.name=process_reward", "data.chat=false", "examples.step_separator=;")


def test_scores_of_steps_are_read_at_their_separators(tmp_path: Path) -> None:
    made = Made(tmp_path, *STEP_SCORES)
    expected = [("q:a;", 1.0), ("q:a;bc;", 0.0)]
    assert scored(made, made.row("q:", steps=["a", "bc"], labels=[True, False])) == expected
    assert scored(made, made.row("q:", "a;bc;", labels=[1, 0])) == expected
    assert scored(made, made.row("q:", "a;bc", labels=[1, 0])) == expected
    assert made.row("q:", "a;bc", labels=[1, 0]).texts == ["a;bc;"]


def test_steps_of_a_chat_are_those_of_its_last_answer(tmp_path: Path) -> None:
    made = Made(tmp_path, "algorithm.name=process_reward", "examples.step_separator=;")
    found = scored(made, made.row("a;b", "c;d;", labels=[True, False]))
    assert [(text.rpartition("assistant\n")[2], label) for text, label in found] == [("c;", 1.0), ("c;d;", 0.0)]


def test_steps_that_the_template_changes_are_refused(tmp_path: Path) -> None:
    trimming = SMOLLM2.replace("message['content']", "message['content'].strip()").replace(
        "m.content", "m.content.strip()"
    )
    made = Made(tmp_path, "algorithm.name=process_reward", template=trimming)
    with pytest.raises(RowError, match=r"template.*step_separator"):
        made.row("one", steps=["a", "b"], labels=[1, 1])


@pytest.mark.parametrize(
    ("answer", "fields", "said"),
    [
        ("abc", {"labels": [True]}, "no separator"),
        ("a;b", {"labels": [True]}, "2 steps and 1 labels"),
        ("a;b", {}, "labels"),
        ("a;b", {"labels": [True, 2]}, "label 2 of its steps"),
        ("", {"steps": ["a", "b;c"], "labels": [True, True]}, "separator.*inside"),
        ("", {"steps": "a;b", "labels": [True, True]}, "list of texts"),
    ],
)
def test_steps_without_a_score_each_are_refused(tmp_path: Path, answer: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RowError, match=said):
        Made(tmp_path, *STEP_SCORES).row("q:", answer, **fields)


def test_labels_beyond_the_end_of_a_cut_answer_are_left_out(tmp_path: Path) -> None:
    made = Made(tmp_path, *STEP_SCORES, "data.oversize=truncate_right", context=6)
    row = made.row("q:", "a;bcd;", labels=[1, 0])
    assert scored(made, row) == [("q:a;", 1.0)]

"""Rewards of tasks with media: each format of answer, and that hostile text gains nothing and costs little."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_actors.errors import RowError
from relax_actors.messages import Prompt
from relax_actors.rewards import (
    RewardFunction,
    character_error_rate,
    iou,
    multiple_choice,
    temporal_iou,
    word_error_rate,
)
from relax_actors.rewards._error_rate import edit_distance

CHOICES = ["a cat", "a dog", "a cat and a dog", "12 cm", ""]
ANSWERS: dict[RewardFunction, str] = {
    multiple_choice: "B",
    iou: "[[10, 10, 20, 20], [30, 30, 50, 60]]",
    temporal_iou: "[2, 6]",
    character_error_rate: "three cats",
    word_error_rate: "three cats",
}
FEW = settings(max_examples=40, deadline=None)
BIG = 30_000
HOSTILE = [
    *("", " " * BIG, "[" * BIG, "1" * BIG, "1" + " " * BIG, "1 " * BIG, "1," * BIG, "1." * BIG, "1:" * BIG),
    *("[1,2]" + " " * BIG, "[1,2]" * BIG, "<answer>" * BIG, "<answer>" + "x" * BIG, "\\boxed{" * BIG, "(" * BIG),
    *("answer is " * BIG, "A " * BIG, "start" * BIG, "0-" * BIG, "[0,0,1e999,nan]", "[nan, inf, -inf, 1]"),
    *("[-999999999,-999999999,999999999,999999999]", "[20,20,10,10]", "6 - 2", "\ufdfa" * BIG, "\x00", "[15,15,15,15]"),
]


def prompt(answer: str, **metadata: Any) -> Prompt:
    return Prompt("text", np.zeros(1, np.int32), answer, metadata, seed=0, min_version=0)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        *(("B", 1), ("b", 1), ("(B)", 1), ("B.", 1), (" **B** ", 1), ("a dog", 1), ("A dog.", 1), ("[b]", 1)),
        *((r"so \boxed{B}", 1), ("<answer>B</answer> or C", 1), ("<answer>A</answer><answer>B</answer>", 1)),
        *(
            ("The answer is B.", 1),
            ("Answer: (B) because A dog barks", 1),
            ("I think (b)", 1),
            ("The d\u2019s? (B)", 1),
            ("option B, not C", 1),
        ),
        *(("A cat? No: B", 1), ("It must be a dog", 1), ("The answer is A dog", 1), ("B) a dog", 1)),
        *(("C", 0), ("", 0), ("A B C D", 0), ("B, no, C", 0), ("The answer is B. The answer is C.", 0), ("Z", 0)),
        *(("a cat, a dog", 0), ("bad", 0), ("DB", 0), ("<answer></answer>B", 0), ("a cat and a dog", 0)),
    ],
)
def test_multiple_choice_takes_the_last_decisive_letter_or_text(completion: str, score: float) -> None:
    assert multiple_choice(completion, prompt("B", choices=CHOICES)) == score


@pytest.mark.parametrize("answer", ["b", "(B)", "a dog", "A DOG"])
def test_multiple_choice_knows_its_answer_as_letter_or_text(answer: str) -> None:
    assert multiple_choice("B", prompt(answer, choices=CHOICES)) == 1


def test_multiple_choice_works_without_the_texts_of_the_choices() -> None:
    assert multiple_choice("The answer is E", prompt("E")) == 1
    assert multiple_choice("I think it is a cat", prompt("I")) == 0


@given(st.text(), st.sampled_from("ABCD"))
@FEW
def test_a_completion_makes_at_most_one_choice(completion: str, letter: str) -> None:
    scores = [multiple_choice(completion, prompt(each, choices=CHOICES)) for each in "ABCD"]
    assert sum(scores) <= 1
    assert multiple_choice(f"{completion} <answer>{letter}</answer>", prompt(letter, choices=CHOICES)) == 1


@pytest.mark.parametrize(
    ("answer", "metadata", "said"),
    [
        (
            "F",
            {"choices": CHOICES},
            (
                "reward multiple_choice: the answer 'F' is none of the choices "
                "(a cat, a dog, a cat and a dog, 12 cm, ); fix the row"
            ),
        ),
        (
            "2",
            {},
            "reward multiple_choice: the answer '2' is none of the choices (the letters A to Z); fix the row",
        ),
        (
            "A",
            {"choices": "ab"},
            "reward multiple_choice: metadata choices is 'ab'; give a list of at most 26 texts",
        ),
    ],
)
def test_multiple_choice_refuses_an_answer_that_is_no_choice(answer: str, metadata: dict[str, Any], said: str) -> None:
    with pytest.raises(RowError) as caught:
        multiple_choice("A", prompt(answer, **metadata))
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "completion",
    [
        *(
            "[10, 20, 30, 40]",
            "(10,20),(30,40)",
            "<|box_start|>(10,20),(30,40)<|box_end|>",
            "10 20 30 40",
            "10,20,30,40",
        ),
        *(
            '```json\n[{"bbox_2d": [10, 20, 30, 40], "label": "cat"}]\n```',
            "[[10, 20], [30, 40]]",
            "[10.0,\n20.0, 30.0,40]",
        ),
        *('{"x1": 10, "y1": 20, "x2": 30, "y2": 40}', r"\boxed{[10,20,30,40]}", "First [0,0,1,1], then [10,20,30,40]."),
        "<answer>[10,20,30,40]</answer> [0,0,9,9]",
    ],
)
def test_iou_reads_the_formats_of_a_box(completion: str) -> None:
    assert iou(completion, prompt("[10, 20, 30, 40]")) == 1


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        *(("[20, 20, 40, 40]", 1 / 3), ("[10, 20, 30, 60]", 1 / 2), ("[30, 40, 50, 60]", 0), ("[30, 40, 10, 20]", 0)),
        *(("[10, 20, 30]", 0), ("[10, 20, 30, 40, 50]", 0), ("10", 0), ("[10,20,30,40] [0,0,1,1]", 0)),
    ],
)
def test_iou_is_the_overlap(completion: str, score: float) -> None:
    assert iou(completion, prompt("[10, 20, 30, 40]")) == pytest.approx(score)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("[30,30,50,60] [10,10,20,20]", 1),
        ("[10,10,20,20]", 1 / 2),
        ("[10,10,20,20] [10,10,20,20]", 1 / 2),
        ("[10,10,20,20] [30,30,50,60] [0,0,100,100]", 2 / 3),
        ("[10,10,20,20]" * 50, 1 / 50),
        ("[10,10,20,20] [30,30,50,60]" * 200, 0),
    ],
)
def test_more_boxes_than_the_answer_has_gain_nothing(completion: str, score: float) -> None:
    assert iou(completion, prompt(ANSWERS[iou])) == pytest.approx(score)


CORNERS = st.tuples(*[st.integers(0, 50)] * 2, *[st.integers(51, 99)] * 2).map(list)


@given(CORNERS, CORNERS)
@FEW
def test_iou_is_symmetric_and_full_only_for_equal_boxes(one: list[int], other: list[int]) -> None:
    score = iou(str(one), prompt(str(other)))
    assert 0 <= score <= 1
    assert score == pytest.approx(iou(str(other), prompt(str(one))))
    assert (score == 1) == (one == other)


@pytest.mark.parametrize(
    "completion",
    [
        *(
            "[2, 6]",
            "2 - 6",
            "from 2s to 6 seconds",
            "00:02-00:06",
            "<2.0 seconds> to <6.0 seconds>",
            "0:00:02 to 0:00:06",
        ),
        *('{"start": 2, "end": 6}', "{'start': '00:02', 'end': '00:06'}", "2.0\N{EN DASH}6.0", "between 2 and 6"),
        *("<answer>2, 6</answer> 0-1", "0 to 1? No, 2 to 6.", r"\boxed{[2.0,6.0]}"),
    ],
)
def test_temporal_iou_reads_the_formats_of_an_interval(completion: str) -> None:
    assert temporal_iou(completion, prompt("[2, 6]")) == 1
    assert temporal_iou(completion, prompt("00:02 - 00:06")) == 1


@pytest.mark.parametrize(
    ("completion", "score"),
    [("[4, 8]", 1 / 3), ("0 - 600", 4 / 600), ("6 to 8", 0), ("6 - 2", 0), ("[2]", 0), ("1:02 - 1:06", 0), ("2 2", 0)],
)
def test_temporal_iou_is_the_overlap(completion: str, score: float) -> None:
    assert temporal_iou(completion, prompt("[2, 6]")) == pytest.approx(score)


@pytest.mark.parametrize(
    ("completion", "characters", "words"),
    [
        ("Three black cats!", 1, 1),
        ("three  black\ncats", 1, 1),
        ("three black cat", 15 / 16, 2 / 3),
        ("three cats", 10 / 16, 2 / 3),
        ("the three black cats", 12 / 16, 2 / 3),
        ("", 0, 0),
        ("dogs dogs dogs dogs dogs dogs dogs", 0, 0),
    ],
)
def test_error_rates_count_edits_after_normalisation(completion: str, characters: float, words: float) -> None:
    assert character_error_rate(completion, prompt("three black cats")) == pytest.approx(characters)
    assert word_error_rate(completion, prompt("three black cats")) == pytest.approx(words)


def test_word_error_rate_keeps_apostrophes_inside_words() -> None:
    assert word_error_rate("it's 'one' well-known", prompt("It's one well known.")) == 1
    assert word_error_rate("its one well known", prompt("It's one well known.")) == 3 / 4


@given(st.text("ab c", max_size=90), st.text("ab c", max_size=70))
@FEW
def test_edit_distance_is_that_of_the_recurrence(one: str, other: str) -> None:
    @cache
    def recurrence(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        replaced = recurrence(i - 1, j - 1) + (one[i - 1] != other[j - 1])
        return min(replaced, recurrence(i - 1, j) + 1, recurrence(i, j - 1) + 1)

    for i in range(0, len(one), 20):  # from the small cells on, so that the recursion stays shallow
        for j in range(0, len(other), 20):
            recurrence(i, j)
    assert edit_distance(one, other) == recurrence(len(one), len(other))
    words: tuple[Sequence[str], Sequence[str]] = (one.split(), other.split())
    assert edit_distance(*words) == edit_distance(*reversed(words))


@pytest.mark.parametrize(
    ("reward", "answer", "said"),
    [
        (
            iou,
            "[20, 20, 10, 10]",
            (
                "reward iou finds no box with an area in the answer '[20, 20, 10, 10]'; "
                "write [x1, y1, x2, y2] with x1 < x2 and y1 < y2, or a list of such boxes"
            ),
        ),
        (
            temporal_iou,
            "soon",
            (
                "reward temporal_iou finds no interval in the answer 'soon'; "
                "write [start, end] in seconds with start < end"
            ),
        ),
        (
            word_error_rate,
            "...",
            "reward word_error_rate: the answer '...' has no letter or digit to compare; fix the row",
        ),
    ],
)
def test_an_answer_that_cannot_be_compared_is_a_row_error(reward: RewardFunction, answer: str, said: str) -> None:
    with pytest.raises(RowError) as caught:
        reward("x", prompt(answer))
    assert str(caught.value) == said


@pytest.mark.parametrize("reward", [*ANSWERS])
def test_hostile_text_gains_nothing_and_is_scored_in_linear_time(reward: RewardFunction) -> None:
    started = time.process_time()
    for completion in HOSTILE:
        assert 0 <= reward(completion, prompt(ANSWERS[reward])) < 0.35, completion[:40]
    # 27 texts of up to 300 kB; a quadratic pattern takes minutes for one of them.
    assert time.process_time() - started < 20


@given(st.text())
@FEW
def test_any_text_scores_between_0_and_1(completion: str) -> None:
    for reward, answer in ANSWERS.items():
        assert 0 <= reward(completion, prompt(answer)) <= 1

"""What each reward gives, that garbage gets none, and that nothing the model wrote is run."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import Prompt
from relax_actors.rewards import (
    RewardFunction,
    character_error_rate,
    checked,
    exact_match,
    iou,
    load_reward,
    math_verify,
    multiple_choice,
    numeric_match,
    positional_match,
    reasoning_gym_score,
    temporal_iou,
    word_error_rate,
)
from relax_actors.rewards._numeric import last_number
from relax_actors.rewards.scorer import RewardScorer

COMPARING = [
    *(exact_match, positional_match, numeric_match, math_verify),
    *(multiple_choice, iou, temporal_iou, character_error_rate, word_error_rate),
]
NOT_BLANK = st.text(min_size=1).filter(str.strip)


def prompt(answer: str = "", metadata: dict[str, Any] | None = None) -> Prompt:
    return Prompt("text", np.zeros(1, np.int32), answer, metadata or {}, seed=0, min_version=0)


def scored(setting: str | dict[str, float], completion: str, item: Prompt) -> float:
    (total,) = asyncio.run(RewardScorer(setting, "reward.function").score([completion], item))
    return total.reward


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "rewards_" + "".join(c if c.isalnum() else "_" for c in tmp_path.name)
    (tmp_path / f"{name}.py").write_text(
        "constant = 3\n"
        "def half(completion, prompt): return 0.5\n"
        "def nan(completion, prompt): return float('nan')\n"
        "def alone(completion): return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize(("completion", "score"), [("42", 1), (" 42\n", 1), ("4 2", 0), ("", 0), ("42.", 0)])
def test_exact_match_ignores_outer_white_space_only(completion: str, score: float) -> None:
    assert exact_match(completion, prompt(" 42 ")) == score


@pytest.mark.parametrize(
    ("completion", "score"), [("abcd", 1), ("abxd", 0.75), ("ab", 0.5), ("abcdabcd", 0.5), ("", 0)]
)
def test_positional_match_is_the_share_of_the_longer_text(completion: str, score: float) -> None:
    assert positional_match(completion, prompt("abcd")) == score


@given(st.text(), NOT_BLANK)
def test_positional_match_is_a_share_and_full_only_for_an_exact_match(completion: str, answer: str) -> None:
    score = positional_match(completion, prompt(answer))
    assert 0 <= score <= 1
    assert (score == 1) == (exact_match(completion, prompt(answer)) == 1)


@pytest.mark.parametrize("reward", COMPARING)
def test_a_reward_that_compares_needs_an_answer(reward: RewardFunction) -> None:
    with pytest.raises(RowError, match=r"reward \w+ .*none; set data.fields.answer"):
        reward("42", prompt("  "))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 42.", 42),
        ("1, 2, 3", 3),
        ("1,234", 1234),
        ("$1,234,567.50", Fraction("1234567.5")),
        ("1,2345", 2345),
        ("-3", -3),
        ("x=-3", -3),
        ("10-3", 3),
        ("10 - 3", 3),
        ("(2)-3", 3),
        ("\N{MINUS SIGN}7", -7),
        ("+5", 5),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\boxed{\dfrac{1}{2}}", Fraction(1, 2)),
        ("1e-3", Fraction(1, 1000)),
        ("2.5E2", 250),
        ("#### 72", 72),
        ("1/0", None),
        ("1e999999999", None),
        ("9" * 5000, None),
        ("no number", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: Fraction | int | None) -> None:
    assert last_number(text) == number


@given(st.text(), st.fractions())
def test_a_number_is_found_behind_any_text(before: str, number: Fraction) -> None:
    assert last_number(f"{before} = {number}") == number


@given(st.integers(), st.integers())
def test_whole_numbers_match_only_if_equal(found: int, expected: int) -> None:
    assert numeric_match(f"so {found:,}", prompt(str(expected))) == (found == expected)


@pytest.mark.parametrize(("completion", "score"), [("0.333333", 1), ("1/3", 1), ("2/6", 1), ("0.33", 0), ("none", 0)])
def test_other_numbers_match_within_a_millionth(completion: str, score: float) -> None:
    assert numeric_match(completion, prompt("1/3")) == score


def test_numeric_match_refuses_an_answer_without_a_number() -> None:
    with pytest.raises(RowError, match="finds no number in the answer 'blue'"):
        numeric_match("42", prompt("blue"))


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (r"so $\frac{1}{2}$", "0.5", 1),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1),
        ("$(x+1)^2$", "x^2+2x+1", 1),
        ("the answer is 72", "She sold some. #### 72", 1),
        (r"\boxed{[1,2)}", "[1,2)", 1),
        (r"\boxed{3}", "4", 0),
        ("no idea", "4", 0),
        ("", "4", 0),
        (r"\boxed{\frac{1}{", "4", 0),
    ],
)
def test_math_verify_sees_equality(completion: str, answer: str, score: float) -> None:
    assert math_verify(completion, prompt(answer)) == score


def test_math_verify_works_outside_the_main_thread(capfd: pytest.CaptureFixture[str]) -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(math_verify(r"\boxed{1/2}", prompt("0.5"))))
    thread.start()
    thread.join(60)
    assert scores == [1.0]
    assert capfd.readouterr().err == ""


def test_math_verify_refuses_an_answer_without_mathematics() -> None:
    with pytest.raises(RowError, match="finds no expression in the answer"):
        math_verify("4", prompt("$$"))


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (np.float32(0.5), 0.5),
        (np.bool_(0), 0.0),
        (np.int64(3), 3.0),
        (np.array(2.0), 2.0),
        (Fraction(1, 2), 0.5),
    ],
)
def test_any_finite_real_number_is_a_reward(value: object, number: float) -> None:
    result = checked(value, "mine")
    assert (result, type(result)) == (number, float)


@pytest.mark.parametrize(
    "value",
    [None, "1", math.nan, math.inf, -math.inf, np.float32("nan"), 1e39, 10**400, 1j, [1.0], np.ones(1), {}, object],
)
def test_anything_else_is_a_row_error_that_names_reward_and_value(value: object) -> None:
    with pytest.raises(RowError, match="reward mine returned") as caught:
        checked(value, "mine")
    assert repr(value)[:200] in str(caught.value)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_every_finite_float32_passes_unchanged(value: float) -> None:
    assert checked(np.float32(value), "mine") == value


@pytest.mark.parametrize("reward", [*COMPARING, reasoning_gym_score])
def test_built_in_rewards_go_by_their_short_names(reward: RewardFunction) -> None:
    assert load_reward(reward.__name__) is reward


def test_a_users_reward_goes_by_its_path(functions: str) -> None:
    assert load_reward(f"{functions}.half")("", prompt()) == 0.5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "exact_mach",
            r"is not a known reward function; did you mean 'exact_match'.*\? known: character_error_rate, code_tests,",
        ),
        ("zzz", r"is not a known reward function; known: character_error_rate"),
        ("{}.constant", "is a int; name a function"),
        ("{}.alone", r"cannot be called with \(completion, prompt\)"),
        ("{}.absent", "has no 'absent'"),
    ],
)
def test_what_is_no_reward_is_a_config_error(functions: str, name: str, said: str) -> None:
    path = name.format(functions)
    with pytest.raises(ConfigError, match=said) as caught:
        load_reward(path, "rewards.first")
    assert str(caught.value).startswith(f"rewards.first = {path!r}")


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("math_verify", "math_verify", "math"), ("reasoning_gym_score", "reasoning_gym", "tasks")],
)
def test_a_missing_package_is_found_when_the_reward_is_loaded(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'relax-actors\[{extra}\]'"):
        load_reward(name)


@given(st.dictionaries(st.sampled_from(["exact_match", "positional_match"]), st.floats(-10, 10), min_size=1), st.text())
def test_weighted_rewards_are_the_weighted_sum(weights: dict[str, float], completion: str) -> None:
    item = prompt("abcd")
    expected = sum(weight * load_reward(name)(completion, item) for name, weight in weights.items())
    assert scored(weights, completion, item) == pytest.approx(expected)


def test_each_part_of_a_weighted_reward_is_checked(functions: str) -> None:
    with pytest.raises(RowError, match=f"reward {functions}.nan returned nan"):
        scored({"exact_match": 1.0, f"{functions}.nan": 0.0}, "x", prompt("x"))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({}, "names no reward"),
        ({"exact_match": math.nan}, "the weight of 'exact_match' is nan"),
        ({"exact_match": "1"}, "the weight of 'exact_match' is '1'"),
        ({"exact_match": True}, "the weight of 'exact_match' is True"),
        ({"exact_mach": 1.0}, "is not a known reward function"),
    ],
)
def test_wrong_weights_are_config_errors(weights: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RewardScorer(weights, "reward.function")

"""Forms of reward functions: of one sample or of all of a row, async or not, with options, with parts and tokens."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from relax_actors.errors import ConfigError, RowError
from relax_actors.messages import Prompt, Sample
from relax_actors.messages.samples import TokenSequence
from relax_actors.rewards import Score, json_schema
from relax_actors.rewards._form import format_match, length_limits, repetition
from relax_actors.rewards._overlap import normalised_match, token_f1
from relax_actors.rewards.score import Total
from relax_actors.rewards.scorer import RewardScorer, check_options, check_sandboxed, token_rewards

HERE = __name__


def prompt(answer: str = "", **fields: Any) -> Prompt:
    return Prompt("text", np.zeros(1, np.int32), answer, fields, seed=0, min_version=0)


def sample(tokens: int) -> Sample:
    ids = np.zeros(tokens, np.int32)
    return Sample((TokenSequence.of_completion(np.zeros(1, np.int32), ids, ids.astype(np.float32), ids),), "x")


def score(
    setting: str | dict[str, float], texts: list[str], options: Any = None, samples: Any = None, deadline: float = 60
) -> list[Total]:
    scorer = RewardScorer(setting, "reward.function", options, deadline)
    return asyncio.run(scorer.score(texts, prompt("abc"), samples))


def rank(completions: list[str], prompt: Prompt) -> list[float]:
    """Compare the samples of a row."""
    del prompt
    longest = max(map(len, completions))
    return [float(len(text) == longest) for text in completions]


async def slowly(completion: str, prompt: Prompt, *, seconds: float = 0.2) -> float:
    del prompt
    await asyncio.sleep(seconds)
    return float(len(completion))


async def in_parts(completions: list[str], prompt: Prompt, samples: list[Sample]) -> list[Score]:
    del prompt
    return [
        Score(components={"a": 1.0, "b": len(c)}, tokens=[0.5] * len(s.tokens))
        for c, s in zip(completions, samples, strict=True)
    ]


def wrong(completion: str, prompt: Prompt) -> Any:
    del prompt
    return {
        "nan": float("nan"),
        "none": None,
        "tokens": Score(1.0, tokens=[float("inf")]),
        "part": Score(1.0, {"a": "x"}),
    }[completion]  # type: ignore[dict-item]


def too_few(completions: list[str], prompt: Prompt) -> list[float]:
    del prompt
    return [1.0] * (len(completions) - 1)


class Counting:
    def __init__(self, *, start: int, step: float = 1.0) -> None:
        self.value, self.step = float(start), step

    def __call__(self, completion: str, prompt: Prompt) -> float:
        del completion, prompt
        self.value += self.step
        return self.value


def test_a_function_of_all_completions_sees_them_together() -> None:
    assert [total.reward for total in score(f"{HERE}.rank", ["a", "abc", "ab"])] == [0.0, 1.0, 0.0]


def test_calls_of_async_functions_run_together_and_have_a_deadline() -> None:
    totals = score(f"{HERE}.slowly", ["a"] * 100, {f"{HERE}.slowly": {"seconds": 0.3}}, deadline=20)
    assert [total.reward for total in totals] == [1.0] * 100  # one after the other they would take 30 seconds
    with pytest.raises(TimeoutError, match=r"slowly .*0.05 seconds \(reward.deadline\)"):
        score(f"{HERE}.slowly", ["a"], {f"{HERE}.slowly": {"seconds": 30}}, deadline=0.05)


def blocking(completion: str, prompt: Prompt) -> float:
    del completion, prompt
    time.sleep(0.1)
    return 0.0


def test_a_function_that_blocks_does_not_take_time_from_others() -> None:
    options = {f"{HERE}.slowly": {"seconds": 0.05}}
    totals = score({f"{HERE}.blocking": 1.0, f"{HERE}.slowly": 1.0}, ["a"] * 10, options, deadline=0.5)
    assert [total.reward for total in totals] == [1.0] * 10


@dataclass(kw_only=True)
class Threshold:
    """Options of a reward as fields."""

    least: int

    def __call__(self, completion: str, prompt: Prompt) -> float:
        del prompt
        return float(len(completion) >= self.least)


def test_a_dataclass_is_a_reward_with_options() -> None:
    totals = score(f"{HERE}.Threshold", ["a", "abc"], {f"{HERE}.Threshold": {"least": 2}})
    assert [total.reward for total in totals] == [0.0, 1.0]


def test_parts_and_token_rewards_are_weighted_and_kept() -> None:
    (total,) = score({f"{HERE}.in_parts": 2.0, "exact_match": 0.5}, ["abc"], samples=[sample(3)])
    assert total.reward == 2.0 * 4 + 0.5
    assert total.components == {f"{HERE}.in_parts": 4.0, "exact_match": 1.0, "a": 1.0, "b": 3.0}
    assert total.tokens is not None
    assert total.tokens.tolist() == [1.0, 1.0, 1.0]
    found = token_rewards([total, Total(0.0, {})], [3, 2])
    assert found is not None
    assert found.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    with pytest.raises(RowError, match="3 tokens for sample 0, which has 2"):
        token_rewards([total], [2])


@pytest.mark.parametrize("value", ["nan", "none", "tokens", "part"])
def test_what_is_no_score_quarantines_the_row(value: str) -> None:
    with pytest.raises(RowError, match=r"wrong.* returned"):
        score(f"{HERE}.wrong", [value])


def test_a_function_of_all_completions_returns_one_value_for_each() -> None:
    with pytest.raises(RowError, match=r"too_few returned .* for 2 samples"):
        score(f"{HERE}.too_few", ["a", "b"])


def test_a_class_gets_options_once() -> None:
    totals = score(f"{HERE}.Counting", ["a", "b"], {f"{HERE}.Counting": {"start": 3, "step": 0.5}})
    assert [total.reward for total in totals] == [3.5, 4.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, "start: is missing"), ({"start": "x"}, "start: "), ({"start": 1, "stop": 2}, "stop: unknown option")],
)
def test_wrong_options_name_their_key(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf'reward.options."{HERE}.Counting".{said}'):
        score(f"{HERE}.Counting", ["a"], {f"{HERE}.Counting": options})


def test_options_of_no_function_of_the_run_are_refused() -> None:
    check_options({"exact_match": {}}, ["exact_match"])
    with pytest.raises(ConfigError, match=r"reward.options.exact_mach: no reward of the run .* exact_match"):
        check_options({"exact_mach": {}}, ["exact_match"])


@pytest.mark.parametrize(
    ("completion", "answer", "f1", "match"),
    [
        ("The cat, sat!", "cat sat", 1.0, 1.0),
        ("so <answer>a Dog</answer>", "dog", 1.0, 1.0),
        ("the cat sat down", "cat sat", 0.8, 0.0),
        ("cat cat", "cat", 2 / 3, 0.0),
        ("", "cat", 0.0, 0.0),
    ],
)
def test_short_answers_are_compared_after_normalisation(completion: str, answer: str, f1: float, match: float) -> None:
    assert token_f1(completion, prompt(answer)) == pytest.approx(f1)
    assert normalised_match(completion, prompt(answer)) == match
    assert normalised_match(completion, prompt(answers=["nothing", answer])) == match


@pytest.mark.parametrize(("completion", "found"), [("A", 1.0), ("a", 1.0), ("the", 0.0), ("", 0.0), ("!", 0.0)])
def test_an_answer_that_normalises_to_nothing_is_compared_as_it_is(completion: str, found: float) -> None:
    assert normalised_match(completion, prompt("A")) == token_f1(completion, prompt("A")) == found


def test_answers_that_are_no_list_of_texts_are_refused() -> None:
    with pytest.raises(RowError, match="field answers"):
        token_f1("x", prompt(answers="cat"))


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
        ("<think>a</think><answer>4</answer> more", 0.0),
        ("<think>a</think></think><answer>4</answer>", 0.0),
        ("<answer>4</answer>", 0.0),
    ],
)
def test_the_default_format_is_a_thought_and_an_answer(completion: str, found: float) -> None:
    assert format_match(completion, prompt()) == found


def test_lengths_outside_of_the_limits_cost() -> None:
    def found(tokens: int) -> float:
        return length_limits("", prompt(), sample(tokens), least=2, most=4, slope=0.25)

    assert [found(n) for n in (1, 2, 4, 5, 6, 20)] == [-0.25, 0.0, 0.0, -0.25, -0.5, -1.0]


def test_repeated_ngrams_cost_their_share() -> None:
    assert repetition("a b c d e f", prompt(), n=2) == 0.0
    assert repetition("a b a b a b", prompt(), n=2) == pytest.approx(2 / 5 - 1)
    assert repetition("a", prompt(), n=2) == 0.0


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ('{"x": 1}', 1.0),
        ('Here:\n```json\n{"x": 1}\n```', 1.0),
        ('{"x": "1"}', 0.0),
        ('{"x": 1, "y": 2}', 0.0),
        ('{"x": NaN}', 0.0),
        ('{"x": 1e999}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_fits_its_schema(completion: str, found: float) -> None:
    assert json_schema(completion, prompt(schema=SCHEMA)) == found


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (None, "no field schema"),
        ({"type": 3}, "is invalid"),
        ("{oops", "is invalid"),
        (5, "is invalid"),
        ({"$ref": "http://127.0.0.1:1/x.json"}, "refers to"),
    ],
)
def test_a_schema_that_is_none_quarantines_the_row(schema: Any, said: str) -> None:
    with pytest.raises(RowError, match=said):
        json_schema("1", prompt(schema=schema))


@pytest.mark.parametrize("name", ["remote", "judge", "code_tests"])
def test_what_cannot_work_in_a_sandbox_is_refused_there(name: str) -> None:
    check_sandboxed(["exact_match", f"{HERE}.rank"])
    with pytest.raises(ConfigError, match=f"sandbox.*{name}"):
        check_sandboxed(["exact_match", name])

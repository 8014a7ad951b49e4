"""The kind `advantage` of the evaluation of cases: groups, ragged tokens, the statistics of the step, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relax_actors.algorithms.evaluate.kinds import evaluate
from tests.support.messages import assert_says


def advantages(name: str, settings: dict[str, Any] | None = None, **inputs: Any) -> Any:
    (found,) = evaluate([{"kind": "advantage", "name": name, "settings": settings or {}, "inputs": inputs}])
    return found["outputs"] if "outputs" in found else found["error"]


def test_groups_are_told_by_their_ids_in_any_order() -> None:
    found = advantages("rloo", rewards=[1, 5, 0, 3], groups=["a", "b", "a", "b"])
    assert found == {"advantages": [1.0, 2.0, -1.0, -2.0]}


def test_tokens_are_ragged_and_masked() -> None:
    settings = {"gamma": 0.5, "gae_lambda": 0.5}
    found = advantages("gae", settings, rewards=[2, 7], values=[[0.5, 9, 0.25, 1], []], mask=[[1, 0, 1, 1], []])
    # delta is -0.375, 0.25 and 1 at tokens 0, 2 and 3; each adds to the one before by a quarter.
    assert found["advantages"] == [[-0.25, 0.0, 0.5, 1.0], []]
    assert found["returns"] == [[0.25, 0.0, 0.75, 2.0], []]


def test_kl_enters_the_reward_of_tokens_or_of_samples() -> None:
    tokens = {"logprobs": [[-1.0, -1.0], [-1.0]], "reference_logprobs": [[-1.5, -1.5], [-1.5]]}
    settings = {"kl_coefficient": 0.5}
    assert advantages("returns", settings, rewards=[1, 0], **tokens)["advantages"] == [[0.5, 0.75], [-0.25]]
    assert advantages("rloo", settings, rewards=[1, 0], **tokens)["advantages"] == [0.75, -0.75]


def test_statistics_cover_the_samples_of_all_groups() -> None:
    found = advantages("group", {"scale": "none", "whiten": "samples"}, rewards=[1, 0, 4, 0], groups=[0, 0, 1, 1])
    centred = np.array([0.5, -0.5, 2.0, -2.0])
    np.testing.assert_allclose(found["advantages"], centred / centred.std(ddof=1), rtol=1e-6)
    scaled = advantages("group", {"scale": "batch_std", "epsilon": 1e-4}, rewards=[1, 0, 4, 0], groups=[0, 0, 1, 1])
    np.testing.assert_allclose(scaled["advantages"], centred / (np.std([1, 0, 4, 0], ddof=1) + 1e-4), rtol=1e-12)
    signal = advantages("group", {"scale": "none", "signal_scale": True}, rewards=[1, 0, 4, 4], groups=[0, 0, 1, 1])
    assert signal["advantages"] == [1.0, -1.0, 0.0, 0.0]


def test_other_inputs_are_read_where_they_are_needed() -> None:
    assert advantages("greedy", rewards=[1, 3], greedy_rewards=[2, 2])["advantages"] == [-1.0, 1.0]
    parts = {"a": [2.0, 0.0], "b": [0.0, 2.0]}
    weighted = advantages("decoupled", {"weights": {"b": 0.0}}, rewards=[2, 2], components=parts)["advantages"]
    np.testing.assert_allclose(weighted, [0.5**0.5, -(0.5**0.5)], rtol=1e-5)
    means = advantages("ema", {"ema_decay": 0.5}, rewards=[1, 3, 8], roles=["w", "w", "b"], groups=[0, 0, 1])
    assert means["advantages"] == [1.0, 2.5, 8.0]
    assert advantages("length_weighted", rewards=[1, 4], lengths=[2, 1])["advantages"] == [-1.0, 2.0]


def test_bad_cases_say_what_is_wrong() -> None:
    assert_says(advantages("group", rewards=[1, 2], groups=[0]), "ValueError", "groups", "1 ids", "2 samples")
    assert_says(
        advantages("optimal_token", rewards=[1, 2], logprobs=[[-1], [-2]]),
        "ValueError",
        "'squares'",
        "rewards, logprobs",
    )
    assert "is not a known advantage estimator" in advantages("nothing", rewards=[1])


@pytest.mark.parametrize(
    ("name", "settings", "inputs", "error"),
    [
        ("group", {"beta": 1}, {}, "setting 'beta'; remove it. It reads: scale, epsilon, kl_coefficient, whiten, "),
        ("group", {"gamma": 0.5}, {}, "setting 'gamma'; remove it. It reads: scale, epsilon, kl_coefficient, whiten, "),
        (
            "ema",
            {"scale": "group_std"},
            {},
            "setting 'scale'; remove it. It reads: ema_decay, kl_coefficient, whiten, ",
        ),
        ("decoupled", {"scale": "none"}, {}, "setting 'scale'; remove it. It reads: weights, epsilon, whiten, "),
        ("decoupled", {"kl_coefficient": 1}, {}, "setting 'kl_coefficient'; remove it. It reads: weights, epsilon, "),
        ("group", {"kl_kind": "k2"}, {}, "setting 'kl_kind'; remove it. It reads: scale, epsilon, kl_coefficient, "),
        ("group", {}, {"values": [[1], [2]]}, "input 'values'; remove it. It reads: rewards, token_rewards, mask, "),
        ("rloo", {}, {"typo_mask": [[1], [1]]}, "input 'typo_mask'; remove it. It reads: rewards, token_rewards, "),
        ("gae", {}, {"values": [[1], [2]], "turns": [[0], [0]]}, "input 'turns'; remove it. It reads: rewards, "),
    ],
)
def test_settings_and_inputs_without_effect_are_refused(
    name: str, settings: dict[str, Any], inputs: dict[str, Any], error: str
) -> None:
    parts = {"components": {"a": [1, 2]}} if name == "decoupled" else {}
    found = advantages(name, settings, rewards=[1, 2], **inputs, **parts)
    assert found.startswith(f"ValueError: advantage {name!r} does not read the {error}")


def test_turns_are_compared_with_turns_of_the_same_number() -> None:
    turns = {"token_rewards": [[1, 0], [0, 0]], "turns": [[0, 1], [0, 1]]}
    found = advantages("turn", {"scale": "none"}, rewards=[0, 0], **turns)
    assert found == {"advantages": [[0.5, 0.0], [-0.5, 0.0]]}
    together = advantages("all_turns", {"scale": "none"}, rewards=[0, 0], **turns)
    assert together == {"advantages": [[0.75, -0.25], [-0.25, -0.25]]}
    # Without turns, a sample is one turn, and its tokens after the reward share its baseline.
    single = advantages("turn", {"scale": "none"}, rewards=[0, 0], token_rewards=[[0, 1], [0, 0]])
    assert single == {"advantages": [[0.5, 0.5], [-0.5, -0.5]]}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("of_pairs", "float64[2, 2]; it must return [2], one number per sample or [3], one per token"),
        ("not_a_number", "nan at index 0 of 2; it must return finite numbers"),
    ],
)
def test_wrong_numbers_of_an_own_estimator_are_errors(name: str, error: str) -> None:
    path = f"tests.support.wrong_advantages.{name}"
    assert advantages(path, rewards=[1, 2], lengths=[2, 1]) == f"ValueError: advantage {path!r} returned {error}"


def test_own_estimator_gets_its_settings_and_the_defaults_of_the_algorithm_section() -> None:
    path = "tests.support.wrong_advantages.scaled"
    assert advantages(path, {"gamma": 0.5}, rewards=[1, 2]) == {"advantages": [1.5, 2.5]}


def test_tokens_are_told_from_samples_where_there_are_as_many() -> None:
    found = advantages("gae", {"gae_lambda": 1.0}, rewards=[1, 5], values=[[0.5, 0.25], []])
    assert found == {"advantages": [[0.5, 0.75], []], "returns": [[1.0, 1.0], []]}
    assert advantages("rloo", rewards=[1, 0], lengths=[2, 0]) == {"advantages": [1.0, -1.0]}


@pytest.mark.parametrize(
    ("settings", "inputs", "error"),
    [
        ({"whiten": "token"}, {}, "ValueError: setting whiten: Input should be 'none', 'tokens' or 'samples'"),
        ({"scale": "std"}, {}, "ValueError: setting scale: Input should be 'none', 'group_std', 'batch_std' or"),
        (
            {"kl_coefficient": 1.0, "kl_kind": "k4"},
            {},
            "ValueError: setting kl.kind: Input should be 'k1', 'k2', 'k3' or 'abs'",
        ),
        ({"epsilon": "x"}, {}, "TypeError: setting epsilon is 'x'; give a number"),
    ],
)
def test_impossible_settings_are_errors(settings: dict[str, Any], inputs: dict[str, Any], error: str) -> None:
    assert advantages("group", settings, rewards=[1, 2], **inputs).startswith(error)


@pytest.mark.parametrize(("name", "given"), [("ema", "roles"), ("greedy", "greedy_rewards")])
def test_numbers_of_samples_must_fit_the_rewards(name: str, given: str) -> None:
    inputs: dict[str, Any] = {given: [1]}
    assert_says(advantages(name, rewards=[1, 2], **inputs), "ValueError", repr(given), "2 samples")


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        (
            {"rewards": [1, 0], "lengths": [1, 2_000_000_000]},
            (
                "ValueError: 2 samples, padded to the longest of 2000000000 tokens, have 4000000000 cells; a case has "
                "at most 10000000: shorten the samples, or divide them into several cases"
            ),
        ),
        (
            {"rewards": [1, 0], "lengths": [1, -2]},
            "ValueError: input 'lengths' must be a list with the number of tokens of each sample",
        ),
        (
            {"rewards": [0] * 4000, "values": [[0.0] * 3000] + [[0.0]] * 3999},
            (
                "ValueError: 4000 samples, padded to the longest of 3000 tokens, have 12000000 cells; a case has at "
                "most 10000000: shorten the samples, or divide them into several cases"
            ),
        ),
    ],
    ids=["too long", "negative", "too many"],
)
def test_samples_that_do_not_fit_in_padded_tensors_are_errors(inputs: dict[str, Any], error: str) -> None:
    (found,) = evaluate([{"kind": "advantage", "name": "length_weighted", "settings": {}, "inputs": inputs}])
    assert found["error"] == error

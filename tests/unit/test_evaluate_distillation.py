"""Distillation as a kind of `python -m relax_actors.algorithms.evaluate`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from relax_actors.algorithms.evaluate.kinds import evaluate
from tests.support.messages import assert_says


def result_of(name: str, settings: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    (found,) = evaluate([{"kind": "distillation", "name": name, "settings": settings, "inputs": inputs}])
    return found


def test_divergence_over_a_vocabulary_with_its_gradient() -> None:
    # Student 1/2, 1/2 and teacher 4/5, 1/5 at two tokens of the first sample; the second sample is empty.
    logits, teacher = [[[0.0, 0.0], [0.0, 0.0]], []], [[[math.log(4), 0.0], [math.log(4), 0.0]], []]
    found = result_of("forward_kl", {}, logits=logits, teacher_logits=teacher)
    exact = 0.8 * math.log(1.6) + 0.2 * math.log(0.4)
    assert found["outputs"]["loss"] == pytest.approx(exact, abs=1e-9)
    assert found["outputs"]["per_token"] == [pytest.approx([exact, exact], abs=1e-9), []]
    # Gradient of the forward KL in the logits: student - teacher, divided by the number of tokens.
    assert found["gradients"]["logits"][0][0] == pytest.approx([-0.15, 0.15], abs=1e-9)


def test_signals_at_the_sampled_tokens() -> None:
    inputs = {"logprobs": [[-1.0, -2.0], [-3.0]], "teacher_logprobs": [[-0.5, -2.5], [-3.0]]}
    found = result_of("reverse_kl", {}, **inputs)
    assert found["outputs"]["per_token"] == [[0.125, 0.125], [0.0]]
    assert found["gradients"]["logprobs"] == [pytest.approx([-0.5 / 3, 0.5 / 3]), [0.0]]
    found = result_of("advantage", {"coefficient": 2.0}, **inputs, mask=[[1, 0], [1]])
    assert found["outputs"] == {"advantages": [[1.0, 0.0], [0.0]]}


def test_coefficient_multiplies_every_form() -> None:
    sampled = {"logprobs": [[-1.0]], "teacher_logprobs": [[-0.5]]}
    assert result_of("reverse_kl", {"coefficient": 2.0}, **sampled)["outputs"]["loss"] == pytest.approx(0.25)
    logits = {"logits": [[[0.0, 0.0]]], "teacher_logits": [[[1.0, 0.0]]]}
    one, two = (result_of("forward_kl", {"coefficient": c}, **logits) for c in (1.0, 2.0))
    assert two["outputs"]["loss"] == pytest.approx(2 * one["outputs"]["loss"])


def test_settings_and_inputs_without_effect_are_refused() -> None:
    inputs, logits = {"logprobs": [[-1.0]], "teacher_logprobs": [[-0.5]]}, {"logits": [[[0, 0]]]}
    logits |= {"teacher_logits": [[[1, 0]]]}
    sampled = "ValueError: distillation 'reverse_kl' of logprobs does not read the setting"
    assert result_of("reverse_kl", {"tail": "drop"}, **inputs)["error"] == (
        f"{sampled} 'tail'; remove it. It reads: coefficient"
    )
    assert_says(
        result_of("forward_kl", {"teacher_weight": 0.3}, **logits)["error"],
        "ValueError",
        "'forward_kl'",
        "'teacher_weight'",
        "top_k, tail, temperature, coefficient",
    )
    assert_says(
        result_of("jsd", {}, **logits, **inputs)["error"],
        "ValueError",
        "'jsd'",
        "'logprobs'",
        "logits, teacher_logits, mask",
    )
    assert_says(result_of("jsd", {}, **inputs)["error"], 'kind = "jsd"', "top_k")

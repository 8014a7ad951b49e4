"""Distillation as a kind of `python -m relax_actors.algorithms.evaluate`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from relax_actors.algorithms.evaluate.kinds import evaluate


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


def test_unknown_settings_and_kinds_without_a_vocabulary_are_errors() -> None:
    inputs = {"logprobs": [[-1.0]], "teacher_logprobs": [[-0.5]]}
    assert result_of("reverse_kl", {"beta": 1}, **inputs)["error"] == (
        "ValueError: setting 'beta' is not known; known: top_k, tail, teacher_weight, temperature, coefficient"
    )
    assert 'kind = "jsd" compares distributions and needs top_k' in result_of("jsd", {}, **inputs)["error"]

"""The command that evaluates algorithm functions on the numbers of a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_actors.algorithms.evaluate.kinds import evaluate
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.engines.torch.loss_inputs import LossInputs
from relax_actors.engines.torch.objective import StepObjective
from tests.support.messages import assert_says


def one(kind: str, name: str, inputs: dict[str, Any], **settings: Any) -> dict[str, Any]:
    (found,) = evaluate([{"kind": kind, "name": name, "settings": settings, "inputs": inputs}])
    return found


TOKENS = {
    "logprobs": [[-1.0, -2.0], [], [-0.5]],
    "old_logprobs": [[-1.5, -2.0], [], [-0.4]],
    "advantages": [1.0, 0.5, -1.0],
}
LOGITS = {"logits": [[[1.0, 2.0]]], "teacher_logits": [[[2.0, 1.0]]]}
SCORES = {"proximal_logprobs": [[-1]], "rollout_logprobs": [[-1]]}


def test_policy_loss_gives_loss_and_gradient_as_ragged_lists() -> None:
    found = one("policy_loss", "clip", TOKENS)
    assert found["outputs"]["per_token"] == [[pytest.approx(-1.2), -1.0], [], [pytest.approx(0.904837418)]]
    assert found["outputs"]["loss"] == pytest.approx((-1.2 - 1 + 0.904837418) / 3)
    assert found["outputs"]["clipped"] == [[1, 0], [], [0]]
    assert found["gradients"]["logprobs"] == [[0.0, pytest.approx(-1 / 3)], [], [pytest.approx(0.904837418 / 3)]]


def test_sample_ratio_aggregation_and_choice_follow_the_settings() -> None:
    gspo = {"ratio": "sequence_mean", "aggregate": "sample_mean_of_means", "clip_low": 0.5, "clip_high": 0.5}
    found = one("policy_loss", "clip", TOKENS, **gspo)
    assert found["outputs"]["ratio"] == [[pytest.approx(1.284025417)] * 2, [], [pytest.approx(0.904837418)]]
    assert found["outputs"]["loss"] == pytest.approx((-1.284025417 + 0.904837418) / 2)
    chosen = one("policy_loss", "kl_cov", TOKENS)["outputs"]["clipped"]
    assert sum(flag for row in chosen for flag in row) == 1
    masked = one("policy_loss", "clip", TOKENS | {"mask": [[0, 1], [], [0]]})
    assert masked["outputs"]["loss"] == -1.0


def test_other_kinds_give_hand_computed_numbers() -> None:
    pair = {"logprobs": [[-1.0]], "reference_logprobs": [[-1.5]]}
    assert one("kl", "k2", pair)["outputs"]["loss"] == pytest.approx(0.125)
    assert one("kl", "k3", pair, clamp=0.05)["gradients"]["logprobs"] == [[0.0]]
    assert one("entropy", "full", {"logits": [[[0.0, 0.0]], []]})["outputs"]["per_token"] == [
        [pytest.approx(0.693147181)],
        [],
    ]
    sums = one("aggregation", "constant", {"per_token": [[1, 2], [3]]}, length=3)
    assert (sums["outputs"], sums["gradients"]["per_token"][1]) == ({"loss": 1.0}, [pytest.approx(1 / 6)])
    prompts = one("aggregation", "prompt_mean", {"per_token": [[1, 2], [3], [7]], "groups": [0, 0, 1]})
    assert prompts["outputs"] == {"loss": 4.5}  # the mean of 2 and 7
    weighed = {"proximal_logprobs": [[-1.0, -1.0]], "rollout_logprobs": [[-1.5, -1.0]]}
    assert one("correction", "tis", weighed, high=1.2)["outputs"] == {"weights": [[1.2, 1.0]], "bounded": [[1, 0]]}
    assert one("correction", "reject_product", weighed, high=1.2)["outputs"] == {"kept": [0]}
    opsm = weighed | {"advantages": [-1.0]}
    assert one("correction", "opsm", opsm, threshold=0.1)["outputs"] == {"kept": [1]}


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ({"kind": "nope", "inputs": {}}, "ValueError: kind = 'nope' is not known; known: "),
        ([], 'TypeError: a case is an object {"kind": ..., "name": ..., "settings": {...}, "inputs": {...}}'),
        (
            {"kind": "kl", "inputs": {}, "x": 1},
            "ValueError: a case has the unknown key 'x'; known: kind, name, settings",
        ),
        (
            {"kind": "kl", "name": "k3", "inputs": {"logprobs": [[1]]}},
            "input 'reference_logprobs' is missing; given: logp",
        ),
        (
            {"kind": "kl", "name": "k3", "inputs": {"logprobs": [[1]], "reference_logprobs": [[1, 2]]}},
            "input 'reference_logprobs' must have one list of numbers for each sample, of lengths [1]",
        ),
        ({"kind": [], "inputs": {}}, "ValueError: kind = [] is not known; known: "),
        ({"kind": "kl", "name": "k3", "inputs": TOKENS, "settings": [1]}, "TypeError: settings is a list; give an"),
        ({"kind": "correction", "name": "opsm", "inputs": SCORES}, "ValueError: opsm needs the setting threshold"),
        (
            {"kind": "distillation", "name": "jsd", "settings": {"top_k": 3}, "inputs": LOGITS},
            "ValueError: top_k is 3, the vocabulary has 2 tokens",
        ),
        (
            {"kind": "distillation", "name": "jsd", "settings": {"temperature": 0}, "inputs": LOGITS},
            "ValueError: temperature is 0.0; it must be above 0",
        ),
        ({"kind": "entropy", "name": "half", "inputs": {}}, "ValueError: name = 'half' is not known; known: full"),
        (
            {"kind": "policy_loss", "name": "clip", "inputs": TOKENS, "settings": {"clip_low": -1}},
            "ValueError: setting clip_low: Input should be greater than or equal to 0",
        ),
        (
            {"kind": "entropy", "name": "full", "inputs": {"logits": [[[0, 0], [0]]]}},
            "ValueError: input logits[0][1] has 1 numbers, the first token has 2; give as many",
        ),
    ],
)
def test_bad_case_gives_an_error_and_no_numbers(case: Any, error: str) -> None:
    (found,) = evaluate([case])
    assert error in found["error"]
    assert "outputs" not in found


def trained(algorithm: dict[str, Any], advantages: list[float]) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the trainer's own objective for two samples of two and one tokens."""
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.5, -1.9], [-0.4, 0.0]], dtype=torch.float64)
    rollout = torch.tensor([[-1.4, -2.5], [-0.7, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    of_tokens = torch.tensor(advantages, dtype=torch.float64)[:, None].expand_as(logprobs)
    objective = StepObjective(AlgorithmSection.model_validate({"proximal": "actor_fwd", **algorithm}))
    step = LossInputs(logprobs, rollout, of_tokens, mask, proximal=old)
    loss, measured = objective.loss(step)
    scale = objective.gradient_scale(measured)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item() * scale, gradient * scale


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("clip", {"clip_high": 0.4}),
        ("clip", {"log_ratio_penalty": 0.1, "aggregate": "sample_mean_of_means"}),
        ("clip_weight", {"clip_low": 1.0, "clip_high": 4.0}),
        ("gate", {}),
        ("gamma", {}),
        ("geometric", {"clip_low": 0.4, "clip_high": 0.4, "aggregate": "sample_mean_of_means"}),
        ("divergence_mask", {}),
        ("p3o", {}),
        ("examples.custom_loss.damped.damped", {}),
    ],
)
@pytest.mark.parametrize(
    "correction",
    [
        {"kind": "tis", "high": 1.2},
        {"kind": "tis", "level": "sequence", "normalise": "samples"},
        {"kind": "importance"},
        {"kind": "tests.support.wrong_losses.weights", "normalise": "tokens"},
    ],
    ids=["tis", "normalised", "importance", "own"],
)
def test_weighed_loss_is_that_of_the_trainer(name: str, settings: dict[str, Any], correction: dict[str, Any]) -> None:
    tokens = {"logprobs": [[-1.0, -2.0], [-0.5]], "old_logprobs": [[-1.5, -1.9], [-0.4]], "advantages": [1.0, -0.5]}
    rollout = [[-1.4, -2.5], [-0.7]]
    scores = {"proximal_logprobs": tokens["old_logprobs"], "rollout_logprobs": rollout}
    kind = correction["kind"]
    weights = one("correction", kind, scores, **{k: v for k, v in correction.items() if k != "kind"})["outputs"]
    given = {**tokens, "weights": weights["weights"]}
    if name == "p3o" or "." in name:
        given["rollout_logprobs"] = rollout
    found = one("policy_loss", name, given, **settings)
    loss, gradient = trained({"surrogate": name, "correction": correction, **settings}, [1.0, -0.5])
    assert found["outputs"]["loss"] == pytest.approx(loss, rel=1e-12)
    assert found["gradients"]["logprobs"] == [
        pytest.approx(row[:n].tolist(), rel=1e-12) for row, n in zip(gradient, (2, 1), strict=True)
    ]


def test_log_probs_and_cross_entropy_of_targets() -> None:
    inputs = {"logits": [[[0.0, 0.0], [0.0, 1.0]], []], "targets": [[1, 1], []]}
    first, second = -0.693147181, -0.313261688
    found = one("logprobs", "full", inputs)
    assert found["outputs"]["per_token"] == [[pytest.approx(first), pytest.approx(second)], []]
    assert found["outputs"]["loss"] == pytest.approx((first + second) / 2)
    entropy = one("logprobs", "cross_entropy", inputs | {"mask": [[1, 0], []]})
    assert entropy["outputs"]["loss"] == pytest.approx(-first)
    assert entropy["gradients"]["logits"][0] == [[pytest.approx(0.5), pytest.approx(-0.5)], [0.0, 0.0]]
    cold = one("logprobs", "full", inputs, temperature=0.5)
    assert cold["outputs"]["per_token"][0][1] == pytest.approx(-0.126928011)


@pytest.mark.parametrize("target", [2, -1, 0.5])
def test_targets_outside_the_vocabulary_are_refused(target: float) -> None:
    found = one("logprobs", "full", {"logits": [[[0.0, 0.0]]], "targets": [[target]]})
    assert "targets" in found["error"]
    assert "from 0 to 1" in found["error"]


def test_entropy_quantile_selects_the_most_uncertain_tokens() -> None:
    inputs = {"entropies": [[0.1, 0.9, 0.5], [0.7, 2.0]], "mask": [[1, 1, 1], [1, 0]]}
    assert one("entropy", "quantile", inputs, quantile=0.5)["outputs"]["selected"] == [[0, 1, 0], [1, 0]]
    assert one("entropy", "quantile", inputs)["outputs"]["selected"] == [[1, 1, 1], [1, 0]]
    assert "quantile" in one("entropy", "quantile", inputs, quantile=0.0)["error"]


def test_penalties_of_long_samples() -> None:
    overlong = one("shaping", "overlong", {"lengths": [5, 8, 10, 12]}, max_tokens=10, buffer=4, factor=2.0)
    assert overlong["outputs"]["penalty"] == [0.0, -1.0, -2.0, -2.0]
    length = one("shaping", "length", {"rewards": [1.0, 0.0], "lengths": [2, 4]}, factor=0.5)
    assert length["outputs"]["penalty"] == [-0.125, -0.25]
    missing = one("shaping", "overlong", {"lengths": [5]}, buffer=4)
    assert "shaping 'overlong' needs the setting max_tokens" in missing["error"]
    assert "factors" in one("shaping", "length", {"rewards": [1.0], "lengths": [2]}, factors=1)["error"]


def test_weights_multiply_the_loss_as_they_do_in_training() -> None:
    found = one(
        "policy_loss", "clip", {"logprobs": [[-1]], "old_logprobs": [[-1]], "advantages": [1], "weights": [[0.5]]}
    )
    assert found["outputs"]["loss"] == -0.5
    assert found["gradients"]["logprobs"] == [[-0.5]]


@pytest.mark.slow
def test_command_prints_all_cases_and_fails_if_one_fails(tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [{"kind": "policy_loss", "name": "score", "inputs": TOKENS}, {"kind": "x"}]}))
    command = [sys.executable, "-m", "relax_actors.algorithms.evaluate"]
    done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    first, second = json.loads(done.stdout)
    assert first["outputs"]["loss"] == pytest.approx((1.0 + 2.0 - 0.5) / 3)
    assert set(second) == {"kind", "name", "error"}
    refused = subprocess.run([*command, "-"], input="{}", capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert_says(refused.stderr, "no list of cases", '"cases"')
    nested = subprocess.run([*command, "-"], input="[" * 100_000, capture_output=True, text=True, check=False)
    assert nested.returncode == 2
    assert "write a JSON list of cases" in nested.stderr
    assert "Traceback" not in nested.stderr

"""The command that evaluates algorithm functions on the numbers of a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_actors.algorithms.evaluate.kinds import evaluate


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
            {"kind": "policy_loss", "name": "clip", "inputs": TOKENS, "settings": {"clip_lo": 1}},
            "algorithm.clip_lo",
        ),
    ],
)
def test_bad_case_gives_an_error_and_no_numbers(case: Any, error: str) -> None:
    (found,) = evaluate([case])
    assert error in found["error"].replace("clip_lo\n", "algorithm.clip_lo\n")
    assert "outputs" not in found


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
    assert refused.stderr == '-: the file holds no list of cases; write a JSON list of cases, or {"cases": [...]}\n'
    nested = subprocess.run([*command, "-"], input="[" * 100_000, capture_output=True, text=True, check=False)
    assert nested.returncode == 2
    assert "write a JSON list of cases" in nested.stderr
    assert "Traceback" not in nested.stderr

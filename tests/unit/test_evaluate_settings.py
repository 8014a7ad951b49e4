"""Settings and inputs of the evaluated functions that have no effect, or are no numbers, are refused."""

from __future__ import annotations

from typing import Any

import pytest

from relax_actors.algorithms.evaluate.kinds import evaluate
from tests.unit.test_evaluate import LOGITS, SCORES

PLAIN = {"logprobs": [[-1.0]], "old_logprobs": [[-1.5]], "advantages": [1.0]}
KL_INPUTS = {"logprobs": [[-1.0]], "reference_logprobs": [[-1.5]]}
CLIP = "policy_loss 'clip' does not read the"
READ = "ratio, clip_low, clip_high, dual_clip, aggregate, log_ratio_penalty"


@pytest.mark.parametrize(
    ("kind", "name", "inputs", "settings", "error"),
    [
        ("policy_loss", "clip", PLAIN, {"clip_lo": 1}, f"{CLIP} setting 'clip_lo'; remove it. It reads: {READ}"),
        ("policy_loss", "clip", PLAIN, {"tau_pos": 1}, f"{CLIP} setting 'tau_pos'; remove it. It reads: {READ}"),
        ("policy_loss", "clip", PLAIN, {"seed": 1}, f"{CLIP} setting 'seed'; remove it. It reads: {READ}"),
        ("policy_loss", "clip", PLAIN, {"length": 9}, f"{CLIP} setting 'length'; remove it. It reads: {READ}"),
        (
            "policy_loss",
            "clip",
            PLAIN,
            {"name": "dppo_tv"},
            f"{CLIP} setting 'name'; give the settings of the preset, which `relax algorithms NAME` prints",
        ),
        (
            "policy_loss",
            "clip",
            PLAIN,
            {"surrogate": "score"},
            f"{CLIP} setting 'surrogate'; the policy loss is the name of the case",
        ),
        (
            "policy_loss",
            "clip",
            PLAIN,
            {"correction": {"kind": "tis"}},
            (
                f"{CLIP} setting 'correction'; evaluate a case of kind \"correction\", and give its weights as the "
                "input weights"
            ),
        ),
        (
            "policy_loss",
            "clip",
            PLAIN,
            {"kl": {"place": "loss"}},
            f"{CLIP} setting 'kl'; evaluate a case of kind \"kl\"",
        ),
        (
            "policy_loss",
            "clip",
            PLAIN | {"typo_mask": [[1]]},
            {},
            f"{CLIP} input 'typo_mask'; remove it. It reads: logprobs, mask, old_logprobs, weights, advantages",
        ),
        (
            "policy_loss",
            "clip",
            PLAIN | {"rollout_logprobs": [[-1.4]]},
            {},
            f"{CLIP} input 'rollout_logprobs'; remove it. It reads: logprobs, mask, old_logprobs, weights, advantages",
        ),
        (
            "policy_loss",
            "gamma",
            PLAIN,
            {"ratio": "token"},
            (
                "policy_loss 'gamma' does not read the setting 'ratio'; remove it. It reads: gamma_pos, gamma_neg, "
                "aggregate, log_ratio_penalty"
            ),
        ),
        (
            "kl",
            "k3",
            KL_INPUTS,
            {"coefficient": 0.1},
            "kl 'k3' does not read the setting 'coefficient'; multiply the outputs by the coefficient yourself",
        ),
        (
            "kl",
            "k3",
            KL_INPUTS | {"old_logprobs": [[-1.0]]},
            {},
            "kl 'k3' does not read the input 'old_logprobs'; remove it. It reads: logprobs, mask, reference_logprobs",
        ),
        (
            "correction",
            "importance",
            SCORES,
            {"low": 0.1},
            "correction 'importance' does not read the setting 'low'; remove it. It reads: level, normalise",
        ),
        (
            "aggregation",
            "token_mean",
            {"per_token": [[1]]},
            {"length": 2},
            "aggregation 'token_mean' does not read the setting 'length'; remove it. It reads: none",
        ),
    ],
)
def test_settings_and_inputs_without_effect_are_refused(
    kind: str, name: str, inputs: dict[str, Any], settings: dict[str, Any], error: str
) -> None:
    (found,) = evaluate([{"kind": kind, "name": name, "settings": settings, "inputs": inputs}])
    assert found["error"] == f"ValueError: {error}"


OF_TOKENS = {"logits": LOGITS["logits"], "targets": [[0]]}
OVERLONG, SHORT = {"max_tokens": 9, "buffer": 2}, {"lengths": [3]}


@pytest.mark.parametrize(
    ("kind", "name", "inputs", "settings", "error"),
    [
        ("entropy", "full", {"logits": LOGITS["logits"]}, {"temperature": "x"}, "temperature is 'x'; give a number"),
        ("logprobs", "full", OF_TOKENS, {"temperature": None}, "temperature is None; give a number"),
        ("distillation", "jsd", LOGITS, {"temperature": [1]}, "temperature is [1]; give a number"),
        ("correction", "opsm", SCORES | {"advantages": [1.0]}, {"threshold": "x"}, "threshold is 'x'; give a number"),
        ("policy_loss", "clip_cov", PLAIN, {"seed": 0.5}, "seed is 0.5; give a whole number"),
        ("shaping", "overlong", SHORT, OVERLONG | {"buffer": "2"}, "buffer is '2'; give a whole number"),
        ("shaping", "overlong", SHORT, OVERLONG | {"max_tokens": 9.5}, "max_tokens is 9.5; give a whole number"),
        ("shaping", "overlong", SHORT, OVERLONG | {"factor": True}, "factor is True; give a number"),
        ("shaping", "length", SHORT | {"rewards": [1.0]}, {"factor": [1]}, "factor is [1]; give a number"),
    ],
)
def test_settings_that_are_no_numbers_are_refused_by_name(
    kind: str, name: str, inputs: dict[str, Any], settings: dict[str, Any], error: str
) -> None:
    (found,) = evaluate([{"kind": kind, "name": name, "settings": settings, "inputs": inputs}])
    assert found["error"] == f"TypeError: setting {error}"

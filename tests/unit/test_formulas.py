"""Formulas of `relax algorithms` and the docs page: complete, distinct, and those that the code computes."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from relax_actors.algorithms.advantages.groups import Group
from relax_actors.algorithms.advantages.token_baseline import optimal_turn
from relax_actors.algorithms.formulas import constants, formulas
from relax_actors.cli.main import build
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.presets import PRESETS


def plain(name: str, **settings: object) -> dict[str, str]:
    section = AlgorithmSection.model_validate({"name": name, **settings})
    return {formula.part: formula.plain for formula in formulas(section)}


def test_presets_that_differ_read_differently() -> None:
    sections = {name: AlgorithmSection(name=name) for name in PRESETS}
    seen = {str((plain(name), constants(section))): name for name, section in sections.items()}
    assert sorted(seen.values()) == sorted(PRESETS)


def test_list_shows_every_part_of_a_preset() -> None:
    result = CliRunner().invoke(build(["algorithms"]), ["algorithms"])
    assert result.exit_code == 0, result.output
    blocks = dict(block.split(":", 1) for block in result.output.strip().split("\n\n"))
    assert list(blocks) == list(PRESETS)
    for name, block in blocks.items():
        for part, formula in plain(name).items():
            assert f"\n  {part:<12} {formula}\n" in block + "\n"
    assert blocks["luspo"] == (
        " LUSPO, arXiv 2602.05261\n"
        "  advantage    A = (r - mean(r)) / (std(r) + epsilon)\n"
        "  ratio        R = exp(mean over the sample of (lp - old))\n"
        "  loss         -min(R A, clip(R, 1 - clip_low, 1 + clip_high) A)\n"
        "  aggregate    mean over samples of |y| x the sample's loss\n"
        "  with         epsilon = 1e-06, clip_low = 0.002, clip_high = 0.0025"
    )


@pytest.mark.parametrize(
    ("name", "part", "formula"),
    [
        ("opd", "advantage", "A = coefficient (teacher - rollout), log-probs of the token"),
        (
            "self_distill",
            "advantage",
            "A = coefficient (teacher - rollout), log-probs of the token; the teacher is the policy with a hint",
        ),
        ("gpg", "scaled", "A x samples of the step / samples in groups with unequal rewards"),
        ("gdpo", "whitened", "(A - mean(A)) / std(A), over all samples of the step"),
        ("ppo", "KL", "- coefficient (x) in the reward of each token, with x = rollout - ref"),
        ("p3o", "ratio", "R = exp(lp - rollout), of each token"),
        (
            "dppo_tv",
            "dropped",
            "tokens with A > 0 and p - q > clip_high, or A <= 0 and p - q < -clip_low, with p = exp(lp), q = exp(old)",
        ),
        (
            "dapo",
            "shaped",
            "r + min(0, (max_tokens - overlong_buffer - |y|) / overlong_buffer x overlong_factor)",
        ),
    ],
)
def test_formula_of_a_part(name: str, part: str, formula: str) -> None:
    assert plain(name)[part] == formula


def test_teacher_adds_to_an_advantage_after_it_is_whitened() -> None:
    parts = plain("reinforce_pp", distil={"place": "advantage"})
    assert parts["distillation"] == "A + coefficient (teacher - rollout), log-probs of the token"
    assert list(parts).index("whitened") < list(parts).index("distillation")


def test_optimal_turn_baseline_is_its_formula() -> None:
    random = np.random.default_rng(3)
    lengths, mask = np.array([5, 4]), np.array([1, 0, 1, 1, 1, 1, 1, 0, 1], bool)
    logprobs, squares = -random.random(9), random.random(9) / 2
    found = optimal_turn(
        Group(rewards=np.array([1.0, 0.25]), lengths=lengths, loss_mask=mask, logprobs=logprobs, squares=squares)
    )
    # G_k - sum(G_k W_k) / sum(W_k) over samples with k trained tokens or more; the fourth token has no other sample.
    energy = 1 - 2 * np.exp(logprobs) + squares
    first, second = (np.cumsum(energy[part][mask[part]]) for part in (slice(0, 5), slice(5, 9)))
    baseline = (1.0 * first[:3] + 0.25 * second) / (first[:3] + second + 1e-8)
    np.testing.assert_allclose(found[:5][mask[:5]], [*(1.0 - baseline), 1.0], rtol=1e-12)
    np.testing.assert_allclose(found[5:][mask[5:]], 0.25 - baseline, rtol=1e-12)
    assert not found[~mask].any()
    assert plain("optimal_turn_baseline")["advantage"] == (
        "A = G_k - sum(G_k W_k) / sum(W_k) over samples with k trained tokens or more, at the k-th trained token, W_k "
        "= sum over trained tokens up to it of (1 - 2 p_s + sum_v p_s(v)^2)"
    )

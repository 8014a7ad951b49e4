"""Off-policy corrections: hand-computed values, no change for equal policies, no gradient through a weight."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from relax_actors.algorithms.corrections import (
    CorrectionKind,
    RejectKind,
    TokenWeights,
    correction_weights,
    kept_sequences,
    mismatch_metrics,
)
from relax_actors.algorithms.losses import LossMode, add_metrics, reduce_loss
from relax_actors.algorithms.micro_batches import micro_batches
from relax_actors.algorithms.policy import PolicyInputs
from relax_actors.algorithms.surrogates.clipped import clip
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.engines.torch.loss_inputs import LossInputs
from relax_actors.engines.torch.objective import StepObjective

SEEDS = st.integers(0, 2**31 - 1)
KINDS = st.sampled_from(["none", "importance", "tis", "icepop"])
REJECTS = st.sampled_from(list(get_args(RejectKind)))
AGGREGATES = st.sampled_from(list(get_args(LossMode)))
LENGTH = 9
"""`algorithm.length` of the constant loss."""


def logs(*ratios: float) -> Tensor:
    return torch.tensor([ratios]).log()


def weights_of(proximal: Tensor, rollout: Tensor, **settings: Any) -> TokenWeights:
    """Compute the weights of sequences without padding."""
    return correction_weights(proximal, rollout, torch.ones(proximal.shape, dtype=torch.bool), **settings)


def random_step(seed: int, batch: int = 6, seq: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs that require a gradient, rollout log-probs, advantages of sequences, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(batch, seq, generator=generator)
    new = rollout + torch.randn(batch, seq, generator=generator)
    advantages = torch.randn(batch, generator=generator)
    lengths = torch.randint(1, seq + 1, (batch, 1), generator=generator)
    return new.requires_grad_(), rollout, advantages, torch.arange(seq) < lengths


@pytest.mark.parametrize(
    ("kind", "expected", "bounded"),
    [
        ("none", [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ("importance", [0.1, 0.5, 1, 2, 7], [0, 0, 0, 0, 0]),
        ("tis", [0.5, 0.5, 1, 2, 2], [1, 0, 0, 0, 1]),
        ("icepop", [0, 0.5, 1, 2, 0], [1, 0, 0, 0, 1]),
    ],
)
def test_token_weights_match_hand_computed_values(
    kind: CorrectionKind, expected: list[float], bounded: list[int]
) -> None:
    rollout = logs(0.01, 0.02, 0.03, 0.04, 0.05)
    proximal = rollout + logs(0.1, 0.5 + 1e-6, 1, 2 - 1e-6, 7)
    found = weights_of(proximal, rollout, kind=kind, low=0.5, high=2.0)
    torch.testing.assert_close(found.weight, torch.tensor([expected], dtype=torch.float32), rtol=1e-5, atol=1e-5)
    assert found.bounded.int().tolist() == [bounded]


def test_tis_without_a_lower_bound_keeps_small_weights() -> None:
    rollout = logs(0.01, 0.02)
    found = weights_of(rollout + logs(0.1, 7), rollout, kind="tis", high=2.0)
    torch.testing.assert_close(found.weight, torch.tensor([[0.1, 2.0]]), rtol=1e-5, atol=1e-5)
    assert found.bounded.tolist() == [[False, True]]


def test_icepop_without_a_lower_bound_drops_weights_below_one_half() -> None:
    rollout = logs(0.01, 0.02)
    found = weights_of(rollout + logs(0.4, 0.6), rollout, kind="icepop", high=2.0)
    torch.testing.assert_close(found.weight, torch.tensor([[0.0, 0.6]]), rtol=1e-5, atol=1e-5)


def test_mean_k2_and_k3_of_a_sequence_decide_whether_it_is_kept() -> None:
    proximal, rollout = torch.stack([logs(2, 2, 9)[0], logs(0.5, 0.5, 1)[0]]), torch.zeros(2, 3)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    # k2 is log(2)^2 / 2 = 0.2402 for both; k3 is 2 - 1 - log 2 = 0.3069, and 0.5 - 1 + log 2 = 0.1931.
    kept = {
        (kind, limit): kept_sequences(proximal, rollout, mask, kind=kind, max_kl=limit).tolist()
        for kind in ("k2", "k3")
        for limit in (0.2, 0.25, 0.31)
    }
    assert kept == {
        ("k2", 0.2): [False, False],
        ("k2", 0.25): [True, True],
        ("k2", 0.31): [True, True],
        ("k3", 0.2): [False, True],
        ("k3", 0.25): [False, True],
        ("k3", 0.31): [True, True],
    }


def test_kept_sequences_match_hand_computed_values() -> None:
    proximal = torch.stack([logs(4, 0.25, 1)[0], logs(1.5, 1.5, 9)[0], logs(2.5, 2.5, 2.5)[0], logs(1, 1, 9)[0]])
    rollout = torch.zeros(4, 3)
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, True], [False, False, False]])
    bounds = {"low": 0.5, "high": 2.0}
    # Geometric means: 1, 1.5 (its third token is masked), 2.5, no tokens.
    assert kept_sequences(proximal, rollout, mask, kind="none", **bounds).tolist() == [True] * 4
    assert kept_sequences(proximal, rollout, mask, kind="geometric", **bounds).tolist() == [True, True, False, True]
    assert kept_sequences(proximal, rollout, mask, kind="max", **bounds).tolist() == [False, True, False, True]


@given(SEEDS, KINDS, REJECTS, st.floats(0, 1), st.floats(1, 10))
def test_equal_policies_need_no_correction(
    seed: int, kind: CorrectionKind, reject: RejectKind, low: float, high: float
) -> None:
    new, _, _, mask = random_step(seed)
    found = weights_of(new, new, kind=kind, low=low, high=high)
    assert (found.weight == 1).all()
    assert not found.bounded.any()
    assert kept_sequences(new, new, mask, kind=reject, low=low, high=high).all()


@given(SEEDS, st.floats(0, 1), st.floats(1, 10))
def test_bounded_weights_equal_the_plain_ones_within_the_bounds(seed: int, low: float, high: float) -> None:
    new, rollout, _, _ = random_step(seed)
    plain, tis, icepop = (
        weights_of(new, rollout, kind=kind, low=low, high=high) for kind in ("importance", "tis", "icepop")
    )
    for found in (tis, icepop):
        assert torch.equal(found.weight[~found.bounded], plain.weight[~found.bounded])
        assert (found.weight <= high + 1e-6).all()
    assert (tis.weight >= low - 1e-6).all()
    assert not icepop.weight[icepop.bounded].any()
    assert torch.equal(tis.bounded, icepop.bounded)


@given(SEEDS, REJECTS)
def test_masked_tokens_reject_no_sequence(seed: int, kind: RejectKind) -> None:
    new, rollout, _, mask = random_step(seed)
    other = new.masked_fill(~mask, -77.0)
    kept = kept_sequences(new, rollout, mask, kind=kind, low=0.5, high=2.0)
    assert torch.equal(kept, kept_sequences(other, rollout, mask, kind=kind, low=0.5, high=2.0))


@given(SEEDS, KINDS)
def test_no_gradient_flows_through_a_weight(seed: int, kind: CorrectionKind) -> None:
    new, rollout, advantages, _ = random_step(seed)
    weights = weights_of(new, rollout.requires_grad_(), kind=kind, low=0.5, high=2.0)
    assert not weights.weight.requires_grad
    policy = clip(PolicyInputs.of(new, new.detach(), advantages, torch.ones_like(new, dtype=torch.bool)))
    gradient, through = torch.autograd.grad((policy.loss * weights.weight).sum(), [new, rollout], allow_unused=True)
    # At ratio 1 this is REINFORCE with a weight for each token: decoupled PPO at the first step.
    torch.testing.assert_close(gradient, -advantages.unsqueeze(-1) * weights.weight)
    assert through is None


def test_huge_ratios_stay_finite() -> None:
    proximal, rollout = torch.tensor([[-1.0, -1e6]]), torch.tensor([[-1e6, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    for kind in ("importance", "tis", "icepop"):
        assert weights_of(proximal, rollout, kind=kind, low=0.5, high=2).weight.isfinite().all()
    assert kept_sequences(proximal, rollout, mask, kind="geometric", low=0.5, high=2).all()
    assert not kept_sequences(proximal, rollout, mask, kind="max", low=0.5, high=2).any()


def inputs(new: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, **others: Tensor) -> LossInputs:
    """Build inputs where all tokens of a sequence have its advantage."""
    return LossInputs(new, rollout, advantages[:, None].expand(new.shape), mask, **others)


def objective_of(**settings: object) -> StepObjective:
    length = {"length": LENGTH} if settings.get("aggregate") == "constant" else {}
    return StepObjective(AlgorithmSection.model_validate(settings | length))


@given(SEEDS, st.sampled_from(["trainer", "actor_fwd"]), KINDS, REJECTS, AGGREGATES, st.integers(7, 40))
def test_corrected_step_does_not_depend_on_its_micro_batches(
    seed: int, proximal: str, kind: CorrectionKind, reject: RejectKind, aggregate: str, budget: int
) -> None:
    new, rollout, advantages, mask = random_step(seed)
    near = new.detach() + 0.3 * torch.randn(new.shape, generator=torch.Generator().manual_seed(seed))
    settings = {
        "proximal": proximal,
        "correction": {"kind": kind},
        "reject": {"kind": reject},
        "aggregate": aggregate,
        "kl": {"place": "loss", "coefficient": 0.1},
    }

    def run(parts: list[list[int]]) -> tuple[Tensor, dict[str, float]]:
        objective = objective_of(**settings)
        leaf = new.detach().clone().requires_grad_()
        measured = []
        for rows in parts:
            width = int(mask[rows].sum(-1).max())  # each micro-batch is padded to its own longest sequence
            cut = [tensor[rows, :width] for tensor in (leaf, rollout, mask, near)]
            given = inputs(cut[0], cut[1], advantages[rows], cut[2], proximal=cut[3], reference=cut[1])
            loss, found = objective.loss(given)
            loss.backward()
            measured.append(found)
        total = add_metrics(measured)
        assert leaf.grad is not None
        return leaf.grad * objective.gradient_scale(total), objective.metrics(total)

    whole, figures = run([list(range(len(mask)))])
    cut, same = run(micro_batches(mask.sum(-1).tolist(), max_tokens=budget))
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)
    assert same == pytest.approx(figures, rel=1e-4, abs=1e-5)


@given(SEEDS, AGGREGATES)
def test_rejected_sequence_that_is_counted_has_no_loss_but_divides_it(seed: int, aggregate: str) -> None:
    new, rollout, advantages, mask = random_step(seed)
    reject = {"kind": "geometric", "low": 0.6, "high": 1.6, "counted": True}
    kept = kept_sequences(new, rollout, mask, kind="geometric", low=0.6, high=1.6)
    objective, plain = objective_of(reject=reject, aggregate=aggregate), objective_of(aggregate=aggregate)
    loss, measured = objective.loss(inputs(new, rollout, advantages, mask))
    (gradient,) = torch.autograd.grad(loss, new)
    whole, all_measured = plain.loss(inputs(new, rollout, advantages, mask))
    (of_all,) = torch.autograd.grad(whole, new)
    torch.testing.assert_close(gradient, of_all * kept.unsqueeze(-1))
    assert objective.gradient_scale(measured) == plain.gradient_scale(all_measured)


def test_every_prompt_weighs_the_same_whatever_the_number_of_its_tokens() -> None:
    new = torch.full((3, 4), -1.0, requires_grad=True)
    mask = torch.arange(4) < torch.tensor([[4], [2], [3]])
    objective, row_tokens = objective_of(aggregate="prompt_mean"), torch.tensor([6, 6, 3])
    loss, measured = objective.loss(inputs(new, new.detach(), torch.ones(3), mask, row_tokens=row_tokens))
    (gradient,) = torch.autograd.grad(loss * objective.gradient_scale(measured), new)
    # Two prompts, of 6 and 3 tokens: 1 / (2 x 6) and 1 / (2 x 3) for each token of advantage 1.
    expected = -torch.tensor([[1 / 12], [1 / 12], [1 / 6]]) * mask
    torch.testing.assert_close(gradient, expected)


@given(SEEDS, AGGREGATES)
def test_rejected_sequence_does_not_count(seed: int, aggregate: str) -> None:
    new, rollout, advantages, mask = random_step(seed)
    settings = {"reject": {"kind": "geometric", "low": 0.6, "high": 1.6}, "aggregate": aggregate}
    kept = kept_sequences(new, rollout, mask, kind="geometric", low=0.6, high=1.6)
    objective = objective_of(**settings)
    loss, measured = objective.loss(inputs(new, rollout, advantages, mask))
    (gradient,) = torch.autograd.grad(loss, new)
    assert measured["rejected"] == int((~kept).sum())
    assert not gradient[~kept].any()
    if not kept.any():
        assert objective.gradient_scale(measured) == 1.0
        return
    few = new[kept].detach().requires_grad_()
    without = objective_of(aggregate=aggregate)
    alone, found = without.loss(inputs(few, rollout[kept], advantages[kept], mask[kept]))
    (expected,) = torch.autograd.grad(alone, few)
    by = without.gradient_scale(found)
    torch.testing.assert_close(gradient[kept] * objective.gradient_scale(measured), expected * by, rtol=1e-4, atol=1e-6)
    assert objective.metrics(measured)["loss"] == pytest.approx(alone.item() * by, rel=1e-4, abs=1e-6)


@given(SEEDS, AGGREGATES)
def test_default_objective_is_the_clipped_loss_against_the_rollout(seed: int, aggregate: LossMode) -> None:
    new, rollout, advantages, mask = random_step(seed)
    objective = objective_of(aggregate=aggregate)
    found, measured = objective.loss(inputs(new, rollout, advantages, mask))
    policy = clip(PolicyInputs.of(new, rollout, advantages, mask))
    normaliser = {"token_mean": float(mask.sum()), "constant": float(len(mask) * LENGTH)}.get(aggregate, len(mask))
    expected = reduce_loss(policy.loss, mask, mode=aggregate, normaliser=normaliser)
    torch.testing.assert_close(found * objective.gradient_scale(measured), expected)
    assert {"abs_delta", "k3", "ratio", "max_ratio"} <= measured.keys()
    assert not {"weight", "bounded", "rejected", "trained"} & measured.keys()


def test_clipping_is_relative_to_the_proximal_policy() -> None:
    new = logs(0.5, 0.5).requires_grad_()
    rollout, near = logs(0.25, 0.5), logs(0.5, 0.4)  # ratios to the rollout: 2 and 1; to `near`: 1 and 1.25
    mask = torch.ones(1, 2, dtype=torch.bool)

    def clipped(**settings: object) -> float:
        given = {"proximal": near} if settings["proximal"] == "actor_fwd" else {}
        _, measured = objective_of(**settings).loss(inputs(new, rollout, torch.ones(1), mask, **given))
        return measured["clipped"]

    assert [clipped(proximal=p) for p in ("rollout", "trainer", "actor_fwd")] == [1, 0, 1]
    objective = objective_of(proximal="actor_fwd", correction={"kind": "importance"})
    loss, measured = objective.loss(inputs(new, rollout, torch.ones(1), mask, proximal=near))
    # Token 1: -(0.5/0.25) * (0.5/0.5); token 2: -(0.4/0.5) * min(0.5/0.4, 1.2).
    assert loss.item() * objective.gradient_scale(measured) == pytest.approx(-(2 * 1 + 0.8 * 1.2) / 2)
    assert measured["weight"] == pytest.approx(2.8)


def test_invalid_arguments_are_refused_with_the_remedy() -> None:
    new, old, advantages, mask = random_step(0)
    with pytest.raises(ValueError, match=r"\[1\.5, 2\]; they must enclose 1"):
        weights_of(new, old, kind="tis", low=1.5, high=2)
    with pytest.raises(ValueError, match=r"bounds of the ratio are \[0\.5, 0\.9\]"):
        kept_sequences(new, old, mask, kind="max", low=0.5, high=0.9)
    with pytest.raises(ValueError, match=r"shapes .* differ"):
        weights_of(new, old[:1], kind="tis", low=0.5, high=2)
    with pytest.raises(ValueError, match=r"shapes .* differ"):
        kept_sequences(new, old, mask[:1], kind="max", low=0.5, high=2)
    with pytest.raises(ValueError, match=r"shapes .* differ"):
        mismatch_metrics(new, old[:1], mask)
    with pytest.raises(ValueError, match="the batch lacks its log-probs; add the role"):
        objective_of(proximal="actor_fwd").loss(inputs(new, old, advantages, mask))


@pytest.mark.parametrize("proximal", ["rollout", "trainer"])
def test_score_is_weighed_by_the_trained_over_the_rollout_policy(proximal: str) -> None:
    settings = {"surrogate": "score", "ratio": "none", "proximal": proximal, "correction": {"kind": "importance"}}
    objective = StepObjective(AlgorithmSection.model_validate(settings))
    trained = torch.tensor([[-1.0, -0.5]], dtype=torch.float64, requires_grad=True)
    before, rollout = (torch.tensor([row], dtype=torch.float64) for row in ((-2.0, -1.5), (-2.2, -1.6)))
    ones, mask = torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    loss, _ = objective.loss(LossInputs(trained, rollout, ones, mask, proximal=before))
    (gradient,) = torch.autograd.grad(loss, trained)
    assert gradient[0].tolist() == pytest.approx([-math.exp(1.2), -math.exp(1.1)])

"""Losses compared with loops over tokens, exact divergences, and the loss of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relax_actors.algorithms.kl import KLKind, kl_estimate
from relax_actors.algorithms.losses import LossMode, reduce_loss, sft_loss
from relax_actors.algorithms.micro_batches import micro_batches
from relax_actors.algorithms.policy import PolicyInputs, PolicyLoss
from relax_actors.algorithms.surrogates.clipped import clip

SEEDS = st.integers(0, 2**31 - 1)
UNTIMED = settings(deadline=None)  # the first use of an operator in a process takes torch half a second
MODES = st.sampled_from(list(get_args(LossMode)))
CLIP_LOW, CLIP_HIGH, DUAL = 0.2, 0.28, 3.0


def random_step(seed: int, batch: int = 5, seq: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs that require a gradient, old log-probs, advantages of sequences, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(batch, seq, generator=generator)
    new = old + torch.randn(batch, seq, generator=generator)
    advantages = torch.randn(batch, generator=generator)
    lengths = torch.randint(1, seq + 1, (batch, 1), generator=generator)
    return new.requires_grad_(), old, advantages, torch.arange(seq) < lengths


def clipped_loss(new: Tensor, old: Tensor, advantages: Tensor, dual_clip: float | None = DUAL) -> PolicyLoss:
    inputs = PolicyInputs.of(new, old, advantages, torch.ones_like(new, dtype=torch.bool))
    return clip(inputs, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, dual_clip=dual_clip)


def loss_of_one_token(new: float, old: float, advantage: float, dual_clip: float | None) -> tuple[float, bool]:
    """Compute the clipped loss of one token case by case, and whether it is clipped."""
    ratio = math.exp(new - old)
    if advantage > 0 and ratio > 1 + CLIP_HIGH:
        return -advantage * (1 + CLIP_HIGH), True
    if advantage < 0 and ratio < 1 - CLIP_LOW:
        return -advantage * (1 - CLIP_LOW), True
    if advantage < 0 and dual_clip is not None and ratio > dual_clip:
        return -advantage * dual_clip, True
    return -advantage * ratio, False


@UNTIMED
@given(SEEDS, st.sampled_from([None, DUAL]))
def test_policy_loss_equals_a_loop_over_tokens(seed: int, dual_clip: float | None) -> None:
    new, old, advantages, _ = random_step(seed)
    result = clipped_loss(new, old, advantages, dual_clip)
    for row in range(new.shape[0]):
        for column in range(new.shape[1]):
            expected, clipped = loss_of_one_token(
                new[row, column].item(), old[row, column].item(), advantages[row].item(), dual_clip
            )
            assert result.loss[row, column].item() == pytest.approx(expected, rel=1e-5)
            assert result.clipped[row, column].item() == clipped


def test_advantage_of_a_sequence_applies_to_each_of_its_tokens() -> None:
    new, old, advantages, _ = random_step(1)
    spread = advantages.unsqueeze(-1).expand_as(new)
    assert torch.equal(clipped_loss(new, old, advantages).loss, clipped_loss(new, old, spread).loss)


@UNTIMED
@given(SEEDS, st.sampled_from([None, DUAL]))
def test_gradient_is_zero_for_clipped_tokens_and_minus_advantage_times_ratio_for_others(
    seed: int, dual_clip: float | None
) -> None:
    new, old, advantages, _ = random_step(seed)
    result = clipped_loss(new, old, advantages, dual_clip)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)
    expected = torch.where(result.clipped, 0.0, -advantages.unsqueeze(-1) * result.ratio)
    torch.testing.assert_close(gradient, expected)


def test_on_policy_gradient_equals_reinforce() -> None:
    new, _, advantages, _ = random_step(0)
    result = clipped_loss(new, new, advantages)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)
    torch.testing.assert_close(gradient, -advantages.unsqueeze(-1).expand_as(new))
    assert not result.clipped.any()
    assert (result.ratio == 1).all()
    assert not result.ratio.requires_grad


def test_no_gradient_flows_to_old_log_probs_or_advantages() -> None:
    new, old, advantages, _ = random_step(0)
    result = clipped_loss(new, old.requires_grad_(), advantages.requires_grad_())
    gradients = torch.autograd.grad(result.loss.sum(), [new, old, advantages], allow_unused=True)
    assert [g is None for g in gradients] == [False, True, True]


def test_huge_log_ratio_keeps_loss_and_gradient_finite() -> None:
    new = torch.tensor([[-1.0, -1.0, -1e6]], requires_grad=True)
    old = torch.tensor([[-1e6, -1.0, -1.0]])
    for advantage in (-1.0, 1.0):
        loss = reduce_loss(
            clipped_loss(new, old, torch.tensor([advantage]), None).loss,
            torch.tensor([[False, True, True]]),
            mode="token_mean",
            normaliser=2,
        )
        (gradient,) = torch.autograd.grad(loss, new)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert gradient[0, 0] == 0


@UNTIMED
@given(SEEDS, MODES, st.integers(7, 40))
def test_micro_batches_add_up_to_the_loss_and_gradient_of_the_whole_batch(
    seed: int, mode: LossMode, budget: int
) -> None:
    new, old, advantages, mask = random_step(seed)
    normaliser = float(mask.sum()) if mode == "token_mean" else float(len(mask))

    def loss_of(rows: list[int]) -> Tensor:
        width = int(mask[rows].sum(-1).max())  # each micro-batch is padded to its own longest sequence
        cut, was = new[rows, :width], old[rows, :width]
        per_token = clipped_loss(cut, was, advantages[rows]).loss + 0.1 * kl_estimate(cut, was, "k2")
        return reduce_loss(per_token, mask[rows, :width], mode=mode, normaliser=normaliser)

    whole = loss_of(list(range(len(mask))))
    (gradient,) = torch.autograd.grad(whole, new)
    parts = [loss_of(rows) for rows in micro_batches(mask.sum(-1).tolist(), max_tokens=budget)]
    for part in parts:
        part.backward()
    torch.testing.assert_close(torch.stack([p.detach() for p in parts]).sum(), whole.detach())
    torch.testing.assert_close(new.grad, gradient)


@UNTIMED
@given(SEEDS, MODES)
def test_masked_tokens_change_neither_loss_nor_gradient(seed: int, mode: LossMode) -> None:
    new, old, advantages, mask = random_step(seed)
    loss = reduce_loss(clipped_loss(new, old, advantages).loss, mask, mode=mode, normaliser=3)
    other = new.detach().masked_fill(~mask, -77.0).requires_grad_()
    changed = reduce_loss(clipped_loss(other, old, advantages).loss, mask, mode=mode, normaliser=3)
    assert loss == changed
    gradients = torch.autograd.grad(loss, new) + torch.autograd.grad(changed, other)
    assert torch.equal(*gradients)
    assert not gradients[0][~mask].any()


def test_token_mean_weights_tokens_and_mean_of_means_samples_equally() -> None:
    per_token = torch.tensor([[1.0, 1.0, 1.0], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    assert reduce_loss(per_token, mask, mode="token_mean", normaliser=4) == 2.0
    assert reduce_loss(per_token, mask, mode="sample_mean_of_means", normaliser=2) == 3.0


def test_sft_loss_is_cross_entropy_of_the_tokens_of_the_mask() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 6, 9, generator=generator)
    targets = torch.randint(0, 9, (4, 6), generator=generator)
    mask = torch.rand(4, 6, generator=generator) < 0.6
    expected = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(sft_loss(logprobs, mask, float(mask.sum())), expected)


def categoricals(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits that require a gradient, and log-probs of policy and reference over 6 tokens, float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(1, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    return logits, logits.log_softmax(-1), reference


@UNTIMED
@given(SEEDS, st.sampled_from(["k1", "k3"]))
def test_expectation_of_k1_and_k3_is_the_exact_divergence(seed: int, kind: KLKind) -> None:
    _, policy, reference = categoricals(seed)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference, kind)).sum(), exact)


@UNTIMED
@given(SEEDS)
def test_k2_is_close_to_the_divergence_for_similar_policies(seed: int) -> None:
    _, policy, reference = categoricals(seed)
    near = (0.99 * policy + 0.01 * reference).log_softmax(-1)
    exact = (policy.exp() * (policy - near)).sum()
    torch.testing.assert_close((policy.exp() * kl_estimate(policy, near, "k2")).sum(), exact, rtol=0.05, atol=1e-9)


@UNTIMED
@given(SEEDS, st.floats(0, 30))
def test_k2_and_k3_are_never_negative_and_zero_for_equal_log_probs(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, reference = -scale * torch.rand(2, 4, 8, generator=generator)
    for kind in ("k2", "k3"):
        assert (kl_estimate(new, reference, kind) >= -1e-6).all()
        assert not kl_estimate(new, new, kind).any()


DIVERGENCE_WITH_THE_GRADIENT_OF: dict[KLKind, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda policy, _: 0 * policy.sum(),
    "k2": lambda policy, reference: (policy.exp() * (policy - reference)).sum(),
    "k3": lambda policy, reference: (reference.exp() * (reference - policy)).sum(),
}


@UNTIMED
@given(SEEDS, st.sampled_from(["k1", "k2", "k3"]))
def test_expected_gradient_of_each_estimate_is_as_documented(seed: int, kind: KLKind) -> None:
    logits, policy, reference = categoricals(seed)
    estimate = (policy.exp().detach() * kl_estimate(policy, reference, kind)).sum()
    exact = DIVERGENCE_WITH_THE_GRADIENT_OF[kind](policy, reference)
    (actual,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(actual, expected)


def test_invalid_arguments_are_refused_with_the_remedy() -> None:
    new, old, advantages, mask = random_step(0)
    with pytest.raises(ValueError, match=r"shapes \[5, 7\] and \[1, 7\] differ"):
        clipped_loss(new, old[:1], advantages)
    with pytest.raises(ValueError, match=r"advantages \[4\] do not match"):
        clipped_loss(new, old, advantages[:4])
    with pytest.raises(ValueError, match=r"dual_clip is 1\.0; .*above 1"):
        clipped_loss(new, old, advantages, dual_clip=1.0)
    with pytest.raises(ValueError, match=r"clip_low is 2\.0"):
        clip(PolicyInputs.of(new, old, advantages, mask), clip_low=2.0)
    with pytest.raises(ValueError, match="normaliser is 0; pass"):
        reduce_loss(new, mask, mode="token_mean", normaliser=0)

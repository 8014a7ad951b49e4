"""Divergences of distillation, against their definitions and against TRL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from relax_actors.algorithms.distillation import distillation_loss, sampled_reverse_kl
from relax_actors.algorithms.vocabulary import score_tokens

KINDS: list[Any] = ["forward_kl", "reverse_kl", "jsd"]


def distributions(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Log-probs of a student, with gradient, and a teacher, float64."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(shape, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    return student.log_softmax(-1).requires_grad_(), teacher.log_softmax(-1)


def test_divergences_of_a_small_case_worked_by_hand() -> None:
    student = torch.tensor([[[0.5, 0.5]]], dtype=torch.float64).log()
    teacher = torch.tensor([[[0.8, 0.2]]], dtype=torch.float64).log()
    forward = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
    reverse = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    # M = 0.25 T + 0.75 S.
    first, second = 0.25 * 0.8 + 0.75 * 0.5, 0.25 * 0.2 + 0.75 * 0.5
    jsd = 0.25 * (0.8 * math.log(0.8 / first) + 0.2 * math.log(0.2 / second))
    jsd += 0.75 * (0.5 * math.log(0.5 / first) + 0.5 * math.log(0.5 / second))
    for kind, expected in zip(KINDS, (forward, reverse, jsd), strict=True):
        for tail in ("bucket", "renormalise", "drop"):
            found = distillation_loss(student, teacher, kind=kind, tail=tail, teacher_weight=0.25)
            assert found.item() == pytest.approx(expected, abs=1e-12), (kind, tail)


def test_bucket_of_the_tail_bounds_the_divergence_of_the_vocabulary_from_below() -> None:
    student, teacher = distributions(3, 5, 40)
    ids = teacher.topk(8, -1).indices
    for kind in KINDS:
        exact = distillation_loss(student, teacher, kind=kind, tail="drop")
        coarse = distillation_loss(student.gather(-1, ids), teacher.gather(-1, ids), kind=kind)
        assert (coarse >= 0).all()
        assert (coarse <= exact + 1e-9).all(), kind
        assert coarse.sum() > 0.4 * exact.sum(), kind


def test_bucket_is_worked_by_hand() -> None:
    student = torch.tensor([[[0.5, 0.2]]], dtype=torch.float64).log()
    teacher = torch.tensor([[[0.6, 0.3]]], dtype=torch.float64).log()
    expected = 0.6 * math.log(0.6 / 0.5) + 0.3 * math.log(0.3 / 0.2) + 0.1 * math.log(0.1 / 0.3)
    assert distillation_loss(student, teacher, kind="forward_kl").item() == pytest.approx(expected, abs=1e-12)
    renormalised = 2 / 3 * math.log(2 / 3 / (5 / 7)) + 1 / 3 * math.log(1 / 3 / (2 / 7))
    found = distillation_loss(student, teacher, kind="forward_kl", tail="renormalise")
    assert found.item() == pytest.approx(renormalised, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ["bucket", "renormalise", "drop"])
def test_gradients_match_finite_differences_and_skip_the_teacher(kind: Any, tail: Any) -> None:
    student, teacher = distributions(2, 3, 6, seed=1)
    teacher.requires_grad_()

    def loss(values: Tensor) -> Tensor:
        return distillation_loss(values[..., :4], teacher[..., :4], kind=kind, tail=tail, teacher_weight=0.3)

    assert torch.autograd.gradcheck(loss, (student.detach().requires_grad_(),))
    loss(student).sum().backward()  # type: ignore[no-untyped-call]
    assert teacher.grad is None


def test_expected_gradient_at_sampled_tokens_is_that_of_the_reverse_kl() -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    _, teacher = distributions(6, seed=4)
    student = logits.log_softmax(-1)
    exact = torch.autograd.grad(
        distillation_loss(student[None, None], teacher[None, None], kind="reverse_kl", tail="drop").sum(),
        logits,
        retain_graph=True,
    )[0]
    per_token = sampled_reverse_kl(student, teacher)
    expected = torch.autograd.grad((student.detach().exp() * per_token).sum(), logits)[0]
    torch.testing.assert_close(expected, exact, atol=1e-12, rtol=0)


def test_impossible_tokens_give_finite_losses_and_gradients() -> None:
    student = torch.tensor([[[0.0, -math.inf]]]).requires_grad_()
    teacher = torch.tensor([[[-math.inf, 0.0]]])
    for kind in KINDS:
        loss = distillation_loss(student, teacher, kind=kind)
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()


def test_ends_of_the_mixture_and_unlike_shapes_are_refused() -> None:
    student, teacher = distributions(1, 2, 3)
    with pytest.raises(ValueError, match=r"^teacher_weight is 1; .*between 0 and 1"):
        distillation_loss(student, teacher, kind="jsd", teacher_weight=1)
    with pytest.raises(ValueError, match="shapes"):
        distillation_loss(student, teacher[..., :2], kind="jsd")


def test_log_probs_at_ids_are_those_of_the_softmax_at_the_temperature() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 8], [3, 3], [1, 2], [5, 4]])
    expected = (logits / 0.7).log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(score_tokens(logits, ids, 0.7).logprobs, expected)

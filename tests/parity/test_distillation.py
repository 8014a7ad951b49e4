"""Divergences of distillation are those of TRL: over the whole vocabulary, and over top-k tokens with their tail.

Differences on purpose, each with its test:

- The support is that of the teacher here, which it sends; SDFT and SDPO take the student's. The divergence on a given
  support is the same.
- The probability of the tail bucket is at least 1e-6 here, without gradient below; TRL bounds it at 1e-7.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch

from relax_actors.algorithms.distillation import distillation_loss

gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer", reason="TRL is not installed; `make test` installs it")


@pytest.mark.parametrize(
    ("beta", "kind", "weight"),
    [
        (0.0, "forward_kl", 0.5),  # TRL's ends of the mixture are divergences; here they have names
        (1.0, "reverse_kl", 0.5),
        (0.1, "jsd", 0.1),
        (0.5, "jsd", 0.5),
        (0.9, "jsd", 0.9),
    ],
)
@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 1, 0]])
def test_loss_and_gradient_equal_trl(beta: float, kind: Any, weight: float, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (len(lengths), 5, 11)
    student, teacher = (torch.randn(shape, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    labels = torch.where(mask, 1, -100)

    theirs = student.clone().requires_grad_()
    loss = gkd.GKDTrainer.generalized_jsd_loss(theirs, teacher, labels, beta=beta, temperature=0.8, reduction="sum")
    loss.backward()

    ours = student.clone().requires_grad_()
    found = distillation_loss(
        (ours / 0.8).log_softmax(-1), (teacher / 0.8).log_softmax(-1), kind=kind, tail="drop", teacher_weight=weight
    )
    found = found.masked_fill(~mask, 0.0).sum()
    found.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=0)


SELF = [
    importlib.import_module(f"trl.experimental.{name}.loss_utils").compute_topk_self_distillation_loss
    for name in ("sdft", "sdpo")
]
ENDS = [(0.0, "forward_kl", 0.5), (1.0, "reverse_kl", 0.5), (0.3, "jsd", 0.3)]


def logits(seed: int = 0, spread: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(3, 5, 11, generator=generator, dtype=torch.float64) * spread for _ in range(2))
    return student.requires_grad_(), teacher


def on_support(student: torch.Tensor, teacher: torch.Tensor, support: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Our divergence on the tokens of the support."""
    return distillation_loss(
        student.log_softmax(-1).gather(-1, support), teacher.log_softmax(-1).gather(-1, support), **settings
    )


@pytest.mark.parametrize("theirs", SELF, ids=["sdft", "sdpo"])
@pytest.mark.parametrize(("alpha", "kind", "weight"), ENDS)
@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_top_k_divergence_on_the_same_support_equals_trl(
    theirs: Any, alpha: float, kind: Any, weight: float, tail: Any, k: int
) -> None:
    student, teacher = logits()
    loss = theirs(
        student,
        teacher,
        distillation_topk=k,
        distillation_alpha=alpha,
        distillation_add_tail=tail == "bucket",
    )
    (expected,) = torch.autograd.grad(loss.sum(), student)
    found = on_support(student, teacher, student.topk(k, -1).indices, kind=kind, tail=tail, teacher_weight=weight)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    torch.testing.assert_close(found, loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-6)


def test_support_is_that_of_the_teacher_where_trl_takes_that_of_the_student() -> None:
    student, teacher = logits()
    loss = SELF[0](student, teacher, distillation_topk=3, distillation_alpha=0.0, distillation_add_tail=True)
    found = on_support(student, teacher, teacher.topk(3, -1).indices, kind="forward_kl", tail="bucket")
    assert float((found - loss).detach().abs().max()) > 1e-2
    # With the roles exchanged, TRL's support is ours.
    other = SELF[0](teacher, student, distillation_topk=3, distillation_alpha=1.0, distillation_add_tail=True)
    torch.testing.assert_close(found, other, atol=1e-6, rtol=1e-6)


def test_tail_of_a_certain_student_is_bounded_at_a_larger_probability_than_that_of_trl() -> None:
    # All but 3e-7 of the student's probability is on the support: ours is 1e-6, that of TRL is exact.
    student = torch.tensor([[[0.0, -15.0]]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[[0.0, 0.0]]], dtype=torch.float64)
    support = torch.tensor([[[0]]])
    found = on_support(student, teacher, support, kind="forward_kl", tail="bucket")
    loss = SELF[0](student, teacher, distillation_topk=1, distillation_alpha=0.0, distillation_add_tail=True)
    assert float(loss.detach() - found.detach()) == pytest.approx(0.5 * (math.log(1e-6) + 15.0), abs=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert float(gradient.abs().max()) < 1e-6

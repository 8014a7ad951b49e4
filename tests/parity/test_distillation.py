"""Divergences of distillation are those of TRL, where the support is the whole vocabulary."""

from __future__ import annotations

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

"""M2PO and DRO against a plain reading of their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from relax_actors.algorithms.policy import PolicyInputs
from relax_actors.algorithms.policy_check import check_policy_loss
from relax_actors.algorithms.surrogates.proximity import choose_second_moment, dro, second_moment


def dropped_one_by_one(advantages: np.ndarray, ratio: np.ndarray, budget: float) -> set[int]:
    """Drop the candidate with the largest squared log-ratio until the mean of the rest is at most the budget."""
    candidates = {
        i for i, (a, r) in enumerate(zip(advantages, ratio, strict=True)) if (a > 0 and r > 1) or (a < 0 and r < 1)
    }
    rest = set(candidates)
    while rest and sum(math.log(ratio[i]) ** 2 for i in rest) / len(rest) > budget:
        rest.remove(max(rest, key=lambda i: math.log(ratio[i]) ** 2))
    return candidates - rest


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [1e-9, 0.04, 0.2, 100.0])
def test_tokens_beyond_the_budget_of_the_second_moment_are_dropped(seed: int, budget: float) -> None:
    random = np.random.default_rng(seed)
    advantages, ratio = random.normal(size=40), np.exp(0.6 * random.normal(size=40))
    advantages[::7] = 0.0
    chosen = choose_second_moment(advantages, ratio, second_moment_budget=budget)
    assert set(np.flatnonzero(chosen)) == dropped_one_by_one(advantages, ratio, budget)


def test_no_token_is_dropped_on_policy_or_without_tokens() -> None:
    assert not choose_second_moment(np.ones(4), np.ones(4), second_moment_budget=1e-9).any()
    assert len(choose_second_moment(np.zeros(0), np.zeros(0), second_moment_budget=0.04)) == 0


def test_losses_equal_their_formulas() -> None:
    new, old = torch.tensor([[-0.5, -1.5]], dtype=torch.float64), torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    new.requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    selected = torch.tensor([[True, False]])
    inputs = PolicyInputs.of(new, old, torch.tensor([2.0], dtype=torch.float64), mask, selected=selected)
    assert second_moment(inputs).loss.tolist() == [[0.0, pytest.approx(-2 * math.exp(-0.5))]]
    of_dro = dro(inputs, dro_beta=0.4).loss
    assert of_dro.tolist() == [[pytest.approx(1.0 + 0.2 * 0.25), pytest.approx(3.0 + 0.2 * 0.25)]]
    (gradient,) = torch.autograd.grad(of_dro.sum(), new)
    assert gradient.tolist() == [[pytest.approx(-2 + 0.4 * 0.5), pytest.approx(-2 - 0.4 * 0.5)]]


@pytest.mark.parametrize("loss", [second_moment, dro])
def test_losses_pass_the_checks_for_users(loss: object) -> None:
    check_policy_loss(loss)  # type: ignore[arg-type]

"""The adaptive coefficient of the entropy bonus against that of TRL's GRPO trainer, step by step.

Differences on purpose, each with its test:

- The coefficient has no upper bound here, and its lower bound is 0; TRL has settings for both (0 and 1).
- The first step has the bonus of the coefficient that is configured; TRL has none before the first measurement.
- With `entropy.quantile`, bonus and measurement cover all tokens here, because the entropy of the policy is what the
  target is of; TRL covers the tokens that are kept.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from relax_actors.algorithms.controllers import Coefficients, adapted
from relax_actors.config.algorithm import AlgorithmSection
from tests.parity.test_policy_losses import (
    accelerator,
    assert_equal,
    our_loss,
    our_step,
    step_of,
    trl_loss,
    trl_trainer,
)
from tests.parity.trl_source import require_trl

require_trl()
TARGET, DELTA = 0.8, 0.05
ENTROPY = {"target": TARGET, "delta": DELTA, "coefficient": 0.08}


def controller(*, last: float = 0.0, coefficient: float = 0.08, most: float = 1.0, **settings: Any) -> SimpleNamespace:
    """A trainer of TRL in training, whose last measured entropy was below the target."""
    arguments = {
        "entropy_target": TARGET,
        "entropy_coef_delta": DELTA,
        "entropy_coef_min": 0.0,
        "entropy_coef_max": most,
    }
    return trl_trainer(
        args=arguments,
        model=SimpleNamespace(training=True),
        accelerator=accelerator(sync_gradients=True),
        use_adaptive_entropy=True,
        _entropy_bonus_enabled=True,
        entropy_coef=coefficient,
        _last_world_entropy=last,
        _entropy_window_stats=None,
        **settings,
    )


def steps(count: int) -> list[dict[str, Tensor]]:
    """Steps whose entropies are on both sides of the target."""
    found = []
    for seed in range(count):
        step = step_of(seed)
        step["entropies"] = step["entropies"] * (0.5 if seed % 5 < 2 else 1.6)
        found.append(step)
    return found


def test_loss_gradient_and_coefficient_are_those_of_trl_over_many_steps() -> None:
    algorithm, trainer = AlgorithmSection.model_validate({"entropy": ENTROPY}), controller()
    ours, values = Coefficients(0.0, 0.08), []
    for step in steps(15):
        assert_equal(our_loss(step, coefficients=ours, entropy=ENTROPY), trl_loss(step, trainer=trainer))
        ours = adapted(algorithm, ours, our_step([step], ours, entropy=ENTROPY)[2])
        assert ours.entropy == pytest.approx(trainer.entropy_coef, abs=1e-12)
        assert ours.last_entropy == pytest.approx(trainer._last_world_entropy, rel=1e-6)
        values.append(ours.entropy)
    assert min(values) == 0.0
    assert max(values) > 0.08


def test_measurement_of_a_step_in_micro_batches_is_that_of_trl() -> None:
    first, second = steps(3)[1:]
    trainer = controller(current_gradient_accumulation_steps=2)
    trainer.accelerator.sync_gradients = False
    trl_loss(first, trainer=trainer)
    assert trainer.entropy_coef == 0.08
    trainer.accelerator.sync_gradients = True
    trl_loss(second, trainer=trainer)
    algorithm, before = AlgorithmSection.model_validate({"entropy": ENTROPY}), Coefficients(0.0, 0.08)
    found = adapted(algorithm, before, our_step([first, second], before, entropy=ENTROPY)[2])
    assert found.entropy == pytest.approx(trainer.entropy_coef, abs=1e-12)
    assert found.last_entropy == pytest.approx(trainer._last_world_entropy, rel=1e-6)


def test_coefficient_has_no_upper_bound_where_that_of_trl_has_one() -> None:
    (step,) = steps(1)
    trainer = controller(coefficient=0.98, most=1.0)
    trl_loss(step, trainer=trainer)
    algorithm, before = AlgorithmSection.model_validate({"entropy": ENTROPY}), Coefficients(0.0, 0.98, 0.0)
    found = adapted(algorithm, before, our_step([step], before, entropy=ENTROPY)[2])
    assert trainer.entropy_coef == 1.0
    assert found.entropy == pytest.approx(1.03)


def test_first_step_has_the_configured_bonus_where_that_of_trl_has_none() -> None:
    (step,) = steps(1)
    theirs = trl_loss(step, trainer=controller(last=float("inf")))
    assert_equal(our_loss(step), theirs)
    bonus = theirs[0] - our_loss(step, entropy=ENTROPY)[0]
    assert bonus == pytest.approx(0.08 * float(step["entropies"][step["mask"]].mean()))


def test_bonus_covers_all_tokens_where_that_of_trl_covers_the_kept_ones() -> None:
    (step,) = steps(1)
    share, mask = {"quantile": 0.5}, step["mask"]
    plain = our_loss(step, entropy=share)[0]
    bonus = plain - our_loss(step, entropy=share | {"coefficient": 0.08})[0]
    assert bonus == pytest.approx(0.08 * float(step["entropies"][mask].mean()))
    of_trl = plain - trl_loss(step, trainer=controller(top_entropy_quantile=0.5))[0]
    half = step["entropies"][mask].quantile(0.5)
    kept = step["entropies"][mask & (step["entropies"] >= half)]
    assert of_trl == pytest.approx(0.08 * float(kept.mean()))
    assert torch.isfinite(kept).all()

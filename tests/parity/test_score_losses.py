"""Losses of reward models against TRL's trainer and transformers' losses, loss and gradient, to 1e-6 in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForSequenceClassificationLoss, ForTokenClassification

from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.engines.torch.loss_inputs import LossInputs
from relax_actors.engines.torch.objective import StepObjective
from tests.parity.test_policy_losses import accelerator
from tests.parity.trl_source import function, require_trl

require_trl()
reward_loss = function("trainer/reward_trainer.py", "compute_loss", nn=nn)
Result = tuple[float, Tensor]


def ours(drawn_scores: Tensor, targets: Tensor, mask: Tensor, signs: Tensor | None = None, **algorithm: Any) -> Result:
    """Loss and gradient of an objective of scores `[sequences, tokens, classes]`; the first half is chosen."""
    objective, leaf = StepObjective(AlgorithmSection.model_validate(algorithm)), drawn_scores.clone().requires_grad_()
    zeros = torch.zeros_like(targets)
    inputs = LossInputs(leaf[..., 0], zeros, zeros + 1 if signs is None else signs, mask, scores=leaf, targets=targets)
    if signs is not None:
        inputs.totals.row = torch.arange(len(leaf) // 2).repeat(2)
    loss, measured = objective.loss(inputs)
    loss.backward()
    scale = objective.gradient_scale(measured)
    assert leaf.grad is not None
    return float(loss.detach()) * scale, leaf.grad * scale


def theirs(scores: Tensor, loss_of: Any) -> Result:
    leaf = scores.clone().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad


def assert_equal(one: Result, other: Result) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-6, abs=1e-6)
    torch.testing.assert_close(one[1], other[1], rtol=1e-6, atol=1e-6)


def drawn(seed: int, *shape: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("centring", [0.0, 0.01])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_loss_of_pairs_is_that_of_the_reward_trainer(seed: int, centring: float, spread: float) -> None:
    pairs, scores = 5, drawn(seed, 10, 1, 1)
    margins = drawn(seed + 100, pairs).abs() * spread
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=centring or None),
        accelerator=SimpleNamespace(**vars(accelerator())),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    given: dict[str, Any] = {"attention_mask": torch.ones(10, 3)} | ({"margin": margins} if spread else {})
    expected = theirs(
        scores, lambda leaf: reward_loss(trainer, lambda **_: SimpleNamespace(logits=leaf[:, 0]), dict(given))
    )
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(pairs).unsqueeze(-1).double()
    mask = torch.ones(10, 1, dtype=torch.bool)
    found = ours(scores, margins.repeat(2)[:, None], mask, signs, name="reward_model", scores={"centring": centring})
    assert_equal(found, expected)


@pytest.mark.parametrize("classes", [2, 3])
def test_loss_of_labelled_answers_is_that_of_sequence_classifiers(classes: int) -> None:
    scores, labels = drawn(classes, 7, 1, classes), torch.arange(7) % classes
    config = SimpleNamespace(num_labels=classes, problem_type=None)
    expected = theirs(
        scores, lambda leaf: ForSequenceClassificationLoss(labels, pooled_logits=leaf[:, 0], config=config)
    )
    mask = torch.ones(7, 1, dtype=torch.bool)
    found = ours(scores, labels[:, None].double(), mask, name="outcome_reward", scores={"classes": classes})
    assert_equal(found, expected)


def test_loss_of_one_score_is_the_binary_cross_entropy() -> None:
    scores, labels = drawn(5, 6, 1, 1), (torch.arange(6) % 2).double()
    expected = theirs(scores, lambda leaf: nn.BCEWithLogitsLoss()(leaf[:, 0, 0], labels))
    found = ours(scores, labels[:, None], torch.ones(6, 1, dtype=torch.bool), name="outcome_reward")
    assert_equal(found, expected)


def test_loss_of_steps_is_that_of_token_classifiers() -> None:
    # As TRL's former trainer of process reward models: the mean over all steps, and -100 at all other tokens.
    scores, labels = drawn(8, 4, 5, 2), torch.randint(0, 2, (4, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(5) < torch.tensor([[5], [1], [3], [2]])
    config = SimpleNamespace(num_labels=2)
    expected = theirs(scores, lambda leaf: ForTokenClassification(leaf, labels.masked_fill(~mask, -100), config=config))
    assert_equal(ours(scores, labels.double(), mask, name="process_reward"), expected)


def test_accuracy_and_margin_are_measured() -> None:
    scores = torch.tensor([1.0, 3.0, 0.5, 4.0], dtype=torch.float64)[:, None, None]
    objective = StepObjective(AlgorithmSection(name="reward_model"))
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)[:, None]
    zeros, mask = torch.zeros(4, 1, dtype=torch.float64), torch.ones(4, 1, dtype=torch.bool)
    inputs = LossInputs(scores[..., 0].requires_grad_(), zeros, signs, mask, scores=scores, targets=zeros)
    inputs.totals.row = torch.arange(2).repeat(2)
    metrics = objective.metrics(objective.loss(inputs)[1])
    losses = [math.log1p(math.exp(-0.5)), math.log1p(math.exp(1.0))]
    assert metrics["loss"] == pytest.approx(sum(losses) / 2)
    assert (metrics["pair_accuracy"], metrics["pair_margin"], metrics["score"]) == pytest.approx((0.5, -0.25, 2.125))

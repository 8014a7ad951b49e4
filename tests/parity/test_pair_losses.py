"""Losses of examples and pairs against TRL's trainers, loss and gradient, to 1e-6 in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.algorithm_parts import OVER_STEP, WITHOUT_REFERENCE
from relax_actors.engines.torch.loss_inputs import LossInputs
from relax_actors.engines.torch.objective import StepObjective
from tests.parity.test_policy_losses import accelerator
from tests.parity.trl_source import function, require_trl

require_trl()
dpo_loss = function("trainer/dpo_trainer.py", "_compute_loss", F=functional, math=math)
kto_loss = function("trainer/kto_trainer.py", "_compute_loss", F=functional)
cpo_loss = function("experimental/cpo/cpo_trainer.py", "cpo_loss", F=functional)
sft_loss = function(
    "trainer/sft_trainer.py", "compute_loss", Version=str, accelerate=SimpleNamespace(__version__=""), transformers=None
)
PAIRS, WIDTH = 5, 9
Result = tuple[float, Tensor]


def step_of(seed: int, spread: float = 0.5) -> dict[str, Tensor]:
    """Log-probs of the policy and the reference, and a mask, of chosen answers and then of rejected ones, float64."""
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, 2 * PAIRS, WIDTH, generator=random, dtype=torch.float64)
    lengths = torch.randint(1, WIDTH + 1, (2 * PAIRS, 1), generator=random)
    logprobs = -drawn[0].abs() - 0.1
    return {"new": logprobs, "reference": -(logprobs + spread * drawn[1]).abs(), "mask": torch.arange(WIDTH) < lengths}


def ours(step: dict[str, Tensor], signs: Tensor | None = None, **algorithm: Any) -> Result:
    """Loss and gradient of an objective, over pairs in one micro-batch; the first half is chosen by default."""
    objective = StepObjective(AlgorithmSection.model_validate(algorithm))
    leaf, mask = step["new"].clone().requires_grad_(), step["mask"]
    n = len(leaf)
    if signs is None:
        signs = torch.tensor([1.0, -1.0]).repeat_interleave(n // 2).unsqueeze(-1).expand_as(leaf).double()
    zeros = torch.zeros_like(leaf)
    row_tokens = mask.sum(-1).view(2, -1).sum(0).repeat(2)
    known = {name: step.get(name) for name in ("reference", "squares")}
    inputs = LossInputs(leaf, zeros, signs, mask, row_tokens=row_tokens, **known)
    inputs.totals.row = torch.arange(n // 2).repeat(2)
    loss, measured = objective.loss(inputs)
    loss.backward()
    scale = objective.gradient_scale(measured)
    assert leaf.grad is not None
    return float(loss.detach()) * scale, leaf.grad * scale


def trl_dpo(step: dict[str, Tensor], losses: dict[str, float], **settings: Any) -> Result:
    """Loss and gradient of `DPOTrainer._compute_loss`, on log-probs in place of a model's."""
    leaf, model = trl_model(step)
    trainer = trl_trainer(
        precompute_ref_logps=True,
        loss_types=list(losses),
        loss_weights=list(losses.values()),
        args=SimpleNamespace(discopop_tau=0.05),
        **{"beta": 0.1, "label_smoothing": 0.0, "f_divergence_type": "reverse_kl", "ld_alpha": None}
        | {"use_weighting": False}
        | settings,
    )
    reference = (step["reference"] * step["mask"] * of_length(step, settings.get("ld_alpha"))).sum(-1)
    given = {"ref_chosen_logps": reference[:PAIRS], "ref_rejected_logps": reference[PAIRS:]}
    loss = dpo_loss(trainer, model, trl_inputs(step) | given, return_outputs=False)
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad


def of_length(step: dict[str, Tensor], alpha: float | None) -> Tensor:
    """Weights of the tokens, `alpha` beyond the length of the shorter answer, which the reference has in TRL, too."""
    lengths = step["mask"].sum(-1)
    shorter = torch.minimum(lengths[:PAIRS], lengths[PAIRS:]).repeat(2)
    beyond = torch.arange(WIDTH) >= shorter[:, None]
    return torch.where(beyond, 1.0 if alpha is None else alpha, 1.0).double()


def trl_model(step: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """Return log-probs, and a model that returns them where they are trained, as TRL's fused head does."""
    leaf, mask = step["new"].clone().requires_grad_(), step["mask"]
    silent = torch.zeros_like(leaf)
    outputs = SimpleNamespace(
        log_sum_sq_probs=None if "squares" not in step else step["squares"].log(),
        log_probs=leaf * mask,
        label_mask=mask,
        entropy=silent,
        mean_logits=silent,
        is_top1=silent.bool(),
    )
    return leaf, lambda **_: outputs


def trl_inputs(step: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tokens with masks, which have one more position: no token is before the first one."""
    whole = torch.cat([torch.zeros(2 * PAIRS, 1), step["mask"]], 1).long()
    return {"input_ids": torch.zeros_like(whole), "completion_mask": whole, "attention_mask": whole}


def trl_trainer(**settings: Any) -> SimpleNamespace:
    """What TRL's trainers of examples and pairs read of themselves."""
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(**vars(accelerator()), device=torch.device("cpu"), parallelism_config=None),
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


def assert_equal(one: Result, other: Result) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-6, abs=1e-6)
    torch.testing.assert_close(one[1], other[1], rtol=1e-6, atol=1e-6)


OF_DPO = (
    *("sigmoid", "hinge", "ipo", "robust", "nca_pair", "apo_zero", "apo_down", "sppo_hard", "bco_pair"),
    *("discopop", "sigmoid_norm", "sft", "exo_pair", "aot", "aot_unpaired"),
)
NOISY = ("robust", "exo_pair", "aot", "aot_unpaired")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", OF_DPO)
def test_loss_and_gradient_are_those_of_the_dpo_trainer(loss: str, seed: int) -> None:
    step, noise = step_of(seed), {"label_smoothing": 0.1} if loss in NOISY else {}
    assert_equal(
        ours(step, name="dpo", pairs={"losses": {loss: 1.0}, "beta": 0.3, **noise}),
        trl_dpo(step, {loss: 1.0}, beta=0.3, **noise),
    )


@pytest.mark.parametrize("divergence", ["forward_kl", "js"])
@pytest.mark.parametrize("loss", OF_DPO)
def test_scores_of_a_divergence_are_those_of_the_dpo_trainer(loss: str, divergence: str) -> None:
    step, noise = step_of(9, spread=0.2), {"label_smoothing": 0.1} if loss in NOISY else {}
    theirs = {"js": "js_divergence"}.get(divergence, divergence)
    assert_equal(
        ours(step, name="dpo", pairs={"losses": {loss: 1.0}, "beta": 0.3, "f_divergence": divergence, **noise}),
        trl_dpo(step, {loss: 1.0}, beta=0.3, f_divergence_type=theirs, **noise),
    )


@pytest.mark.parametrize("alpha", [0.3, 1.0, 2.5])
def test_scores_of_the_alpha_divergence_are_its_derivative(alpha: float) -> None:
    # TRL computes them in float32 alone. f(t) = (t^alpha - alpha t + alpha - 1) / (alpha (alpha - 1)).
    step = step_of(10, spread=0.2)
    reference = (step["reference"] * step["mask"]).sum(-1)

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        ratios = [(chosen - reference[:PAIRS]).exp(), (rejected - reference[PAIRS:]).exp()]
        scores = [t.log() if alpha == 1.0 else (t ** (alpha - 1) - 1) / (alpha - 1) for t in ratios]
        return -torch.log(1 / (1 + torch.exp(-0.3 * (scores[0] - scores[1]))))

    pairs = {"losses": {"sigmoid": 1.0}, "beta": 0.3, "f_divergence": "alpha", "f_alpha": alpha}
    assert_equal(ours(step, name="dpo", pairs=pairs), of_sums(step, loss, means=False))


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("loss", OF_DPO)
def test_desensitised_lengths_are_those_of_the_dpo_trainer(loss: str, alpha: float) -> None:
    step, noise = step_of(11), {"label_smoothing": 0.1} if loss in NOISY else {}
    assert_equal(
        ours(step, name="dpo", pairs={"losses": {loss: 1.0}, "beta": 0.3, "ld_alpha": alpha, **noise}),
        trl_dpo(step, {loss: 1.0}, beta=0.3, ld_alpha=alpha, **noise),
    )


# TRL 1.16 multiplies the output of relu in place, so that the weighted hinge loss has no backward pass there.
@pytest.mark.parametrize("loss", [name for name in OF_DPO if name not in (*OVER_STEP, "hinge")])
def test_weights_of_pairs_are_those_of_the_dpo_trainer(loss: str) -> None:
    step, noise = step_of(12), {"label_smoothing": 0.1} if loss in NOISY else {}
    step["squares"] = torch.rand(step["new"].shape, generator=torch.Generator().manual_seed(1)).double() * 0.9 + 0.05
    assert_equal(
        ours(step, name="dpo", pairs={"losses": {loss: 1.0}, "beta": 0.3, "weighted": True, **noise}),
        trl_dpo(step, {loss: 1.0}, beta=0.3, use_weighting=True, **noise),
    )


def test_weight_of_pairs_of_likely_tokens_is_not_capped() -> None:
    step = step_of(13)
    step["new"] = step["new"] * 0.02
    step["squares"] = torch.full_like(step["new"], 0.9)
    mean = ((step["new"] - math.log(0.9)) * step["mask"]).sum(-1) / step["mask"].sum(-1)
    assert bool((mean[:PAIRS] + mean[PAIRS:] > 0).all())
    weighted = ours(step, name="dpo", pairs={"losses": {"sigmoid": 1.0}, "beta": 0.3, "weighted": True})
    assert_equal(weighted, trl_dpo(step, {"sigmoid": 1.0}, beta=0.3, use_weighting=True))
    assert weighted[0] > ours(step, name="dpo", pairs={"losses": {"sigmoid": 1.0}, "beta": 0.3})[0]


def test_weighted_losses_are_added_up() -> None:
    step, losses = step_of(4), {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}
    assert_equal(ours(step, name="dpo", pairs={"losses": losses}), trl_dpo(step, losses))


def of_sums(step: dict[str, Tensor], loss: Any, *, means: bool) -> Result:
    """Loss and gradient of a function of the log-probs of whole answers, summed or averaged over their tokens."""
    leaf, mask = step["new"].clone().requires_grad_(), step["mask"]
    sums = (leaf * mask).sum(-1)
    if means:
        sums = sums / mask.sum(-1)
    value = loss(sums[:PAIRS], sums[PAIRS:]).mean()
    value.backward()
    assert leaf.grad is not None
    return float(value.detach()), leaf.grad


@pytest.mark.parametrize("alpha", [0.0, 0.25, -0.5])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["cpo", "simpo"])
def test_losses_without_a_reference_are_those_of_the_cpo_trainer(loss: str, noise: float, alpha: float) -> None:
    step = step_of(5)
    trainer = SimpleNamespace(
        alpha=alpha,
        loss_type="sigmoid" if loss == "cpo" else loss,
        beta=0.7,
        simpo_gamma=0.4,
        label_smoothing=noise,
        accelerator=SimpleNamespace(device="cpu"),
    )
    pairs = {"losses": {loss: 1.0}, "beta": 0.7, "gamma": 0.4, "label_smoothing": noise, "alpha": alpha}
    expected = of_sums(step, lambda c, r: cpo_loss(trainer, c, r)[0], means=loss == "simpo")
    assert_equal(ours(step, name="dpo", pairs=pairs), expected)


def test_odds_ratio_is_that_of_the_orpo_paper() -> None:
    # TRL computes it in float32 alone.
    def odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
        odds = [of.exp() / (1 - of.exp()) for of in (chosen, rejected)]
        return -functional.logsigmoid(torch.log(odds[0] / odds[1]))

    step = step_of(6)
    assert_equal(ours(step, name="dpo", pairs={"losses": {"odds_ratio": 1.0}}), of_sums(step, odds_ratio, means=True))


def test_losses_without_a_reference_do_not_read_one() -> None:
    step = step_of(7)
    other = step | {"reference": step["reference"] - 1}
    for loss in WITHOUT_REFERENCE:
        settings = {"name": "dpo", "pairs": {"losses": {loss: 1.0}}}
        assert_equal(ours(step, **settings), ours(other, **settings))


@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_losses_of_examples_are_those_of_the_sft_trainer(loss: str) -> None:
    step = step_of(8)
    leaf, model = trl_model(step)
    arguments = SimpleNamespace(loss_type=loss, average_tokens_across_devices=False, max_length=None)
    trainer = trl_trainer(compute_loss_func=None, label_smoother=None, args=arguments)
    expected = sft_loss(trainer, model, trl_inputs(step))
    expected.backward()
    assert leaf.grad is not None
    assert_equal(ours(step, name="sft" if loss == "nll" else "dft"), (float(expected.detach()), leaf.grad))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", ["kto", "apo_zero"])
def test_losses_of_labelled_answers_are_those_of_the_kto_trainer(loss: str, seed: int) -> None:
    step, weights = step_of(seed), {"good_weight": 1.3, "bad_weight": 0.6}
    labels = torch.tensor([True, False, True, True, False])
    # The first half has the answers, the second half those of other prompts.
    sums = [(step[name] * step["mask"]).sum(-1) for name in ("new", "reference")]
    leaf, model = trl_model({name: values[:PAIRS] for name, values in step.items()})
    trainer = trl_trainer(
        _compute_kl_logps=lambda *_: sums[0][PAIRS:],
        precompute_ref_logps=True,
        calculate_KL=loss == "kto",
        loss_type="kto" if loss == "kto" else "apo_zero_unpaired",
        beta=0.4,
        desirable_weight=weights["good_weight"],
        undesirable_weight=weights["bad_weight"],
    )
    given = {"label": labels, "ref_logps": sums[1][:PAIRS], "ref_KL_logps": sums[1][PAIRS:]}
    inputs = {name: values[:PAIRS] for name, values in trl_inputs(step).items()}
    expected = kto_loss(trainer, model, inputs | given, return_outputs=False)
    expected.backward()
    signs = torch.cat([torch.where(labels, 1.0, -1.0), torch.zeros(PAIRS)]).unsqueeze(-1).expand(-1, WIDTH).double()
    value, gradient = ours(step, signs, name="kto", labels={"loss": loss, "beta": 0.4, **weights})
    assert value == pytest.approx(float(expected.detach()), rel=1e-6)
    assert leaf.grad is not None
    torch.testing.assert_close(gradient[:PAIRS], leaf.grad, rtol=1e-6, atol=1e-6)
    assert not gradient[PAIRS:].any()

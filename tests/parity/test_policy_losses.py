"""Policy losses, KL, entropy and corrections against TRL's own code, loss and gradient, to 1e-6 in float64.

Differences on purpose, each with its test:

- An empty sample does not count here; TRL counts it where it divides by samples.
- The log-ratio of a token is clamped to +-20 here, without gradient beyond; TRL does not clamp.
- The entropy bonus is aggregated as the policy loss here; TRL takes the mean over tokens whatever the loss is.
"""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from relax_actors.algorithms.corrections import CorrectionKind, CorrectionLevel, correction_weights
from relax_actors.algorithms.losses import add_metrics
from relax_actors.algorithms.sequence_records import SequenceRecord, most_uncertain
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.engines.torch.loss_inputs import LossInputs
from relax_actors.engines.torch.objective import StepObjective
from tests.parity.trl_source import _function, function, require_trl

require_trl()
FILE = "trainer/grpo_trainer.py"
LENGTH, CLIP_LOW, CLIP_HIGH = 11, 0.2, 0.28
compute_loss = function(FILE, "_compute_loss", nanmin=torch.min, nanmax=torch.max)
off_policy_mask = function(FILE, "get_off_policy_mask")
gamma_weights = function(FILE, "get_gamma_weights", math=math)
entropy_mask = function(FILE, "get_high_entropy_mask", profiling_decorator=lambda f: f)


def step_of(seed: int, *, empty: bool = False, spread: float = 0.7) -> dict[str, Tensor]:
    """Log-probs, advantages and masks of 6 samples with holes in their masks, ratios of up to e^6, float64."""
    random = torch.Generator().manual_seed(seed)
    shape = (6, 9)
    drawn = torch.randn(6, *shape, generator=random, dtype=torch.float64)
    mask = (torch.arange(9) < torch.tensor([[9], [1], [4], [7], [2], [8]])) & (
        torch.rand(shape, generator=random) < 0.8
    )
    mask[:, 0] = True
    if empty:
        mask[2] = False
    old = -drawn[0].abs() - 0.1
    new = old + spread * drawn[1]
    new[0, 0], new[3, 0] = old[0, 0] + 6, old[3, 0] - 6
    advantages = drawn[2][:, 0].clone()
    advantages[4] = 0.0
    return {
        "new": new,
        "old": old,
        "rollout": old + 0.3 * drawn[3],
        "reference": new + 0.5 * drawn[4],
        "entropies": drawn[5].abs(),
        "advantages": advantages,
        "mask": mask,
    }


def trl_trainer(**settings: Any) -> SimpleNamespace:
    """What TRL's `_compute_loss` reads of its trainer."""
    args = settings.pop("args", {})
    defaults: dict[str, Any] = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon_low": CLIP_LOW,
        "epsilon_high": CLIP_HIGH,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "model": SimpleNamespace(training=False),
        "current_gradient_accumulation_steps": 1,
        "accelerator": accelerator(),
    }
    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    trainer = SimpleNamespace(
        **(defaults | settings),
        args=SimpleNamespace(**(arguments | args)),
        aux_loss_enabled=False,
        max_completion_length=LENGTH,
        get_off_policy_mask=off_policy_mask,
        get_gamma_weights=gamma_weights,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    trainer.get_high_entropy_mask = lambda *given: entropy_mask(trainer, *given)
    return trainer


def accelerator(*, sync_gradients: bool = False) -> SimpleNamespace:
    """An accelerator of one process."""
    return SimpleNamespace(
        num_processes=1,
        sync_gradients=sync_gradients,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, **_: x,
        pad_across_processes=lambda x, **_: x,
    )


def trl_loss(
    step: dict[str, Tensor],
    *,
    compute: Any = compute_loss,
    trainer: Any = None,
    **settings: Any,
) -> tuple[float, Tensor]:
    """Loss and gradient of TRL's `_compute_loss`, by default that of its GRPO trainer."""
    trainer = trainer or trl_trainer(**settings)
    leaf, mask, entropies = step["new"].clone().requires_grad_(), step["mask"], step["entropies"]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, entropies, None)
    ones = torch.ones(len(mask), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": torch.ones(mask.shape, dtype=torch.int64),
        "completion_mask": mask.long(),
        "advantages": step["advantages"],
        "old_per_token_logps": step["old"],
        "old_logps": (step["old"] * mask).sum(1),
        "ref_per_token_logps": step["reference"],
        "num_items_in_batch": mask.sum(),
    } | ({"importance_sampling_ratio": step["weights"]} if "weights" in step else {})
    loss = compute(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient


def our_loss(step: dict[str, Tensor], **settings: Any) -> tuple[float, Tensor]:
    """Loss and gradient of a step with the proximal policy `old`."""
    loss, gradient, _ = our_step([step], **settings)
    return loss, gradient[0]


def our_step(
    micro_batches: list[dict[str, Tensor]], coefficients: Any = None, **settings: Any
) -> tuple[float, list[Tensor], dict[str, float]]:
    """Loss of a step of several micro-batches, the gradient of each, and what was measured."""
    bounds = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
    algorithm = AlgorithmSection.model_validate({"proximal": "actor_fwd"} | bounds | settings)
    objective = StepObjective(algorithm, coefficients)
    losses, parts = [], []
    gradients: list[Tensor] = []
    for step in micro_batches:
        inputs = inputs_of(step, algorithm, objective.top_entropy)
        loss, measured = objective.loss(inputs)
        gradients += torch.autograd.grad(loss, inputs.logprobs)
        losses.append(loss.item())
        parts.append(measured)
    measured = add_metrics(parts)
    scale = objective.gradient_scale(measured)
    return sum(losses) * scale, [gradient * scale for gradient in gradients], measured


def inputs_of(step: dict[str, Tensor], algorithm: AlgorithmSection, top_entropy: float | None) -> LossInputs:
    """Inputs of the objective for a micro-batch, its log-probs a leaf."""
    leaf, mask, uncertain = step["new"].clone().requires_grad_(), step["mask"], None
    if top_entropy is not None:
        flat = step["entropies"][mask].numpy()
        record = SequenceRecord(flat, flat, flat, flat, {})
        uncertain = torch.zeros_like(mask)
        uncertain[mask] = torch.from_numpy(most_uncertain([record], top_entropy)[0])
    return LossInputs(
        leaf,
        step["rollout"],
        step["advantages"][:, None].expand_as(leaf),
        mask,
        proximal=step["old"],
        reference=step["reference"] if algorithm.needs_reference else None,
        entropies=step["entropies"],
        uncertain=uncertain,
    )


def assert_equal(ours: tuple[float, Tensor], theirs: tuple[float, Tensor]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6, abs=1e-6)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)


MEANS, SEQUENCE = {"aggregate": "sample_mean_of_means"}, {"importance_sampling_level": "sequence"}
KL = {"place": "loss", "coefficient": 0.1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (MEANS, {"loss_type": "grpo"}),
    "dapo": ({}, {}),
    "dr_grpo": ({"aggregate": "constant", "length": LENGTH}, {"loss_type": "dr_grpo"}),
    "dual clip": ({"dual_clip": 3.0}, {"args": {"delta": 3.0}}),
    "gspo": (MEANS | {"ratio": "sequence_mean"}, SEQUENCE | {"loss_type": "grpo"}),
    "luspo": ({"ratio": "sequence_mean", "aggregate": "sample_weight_length"}, SEQUENCE | {"loss_type": "luspo"}),
    "luspo with KL": (
        {"ratio": "sequence_mean", "aggregate": "sample_weight_length", "kl": KL},
        SEQUENCE | {"loss_type": "luspo", "beta": 0.1},
    ),
    # TRL's epsilon_high is the bound itself, and there is no lower bound.
    "cispo": (
        {"surrogate": "clip_weight", "clip_low": 1.0, "clip_high": 4.0},
        {"loss_type": "cispo", "epsilon_high": 5.0},
    ),
    "sapo": (MEANS | {"surrogate": "gate"}, {"loss_type": "sapo"}),
    "vespo": ({"surrogate": "gamma", "ratio": "sequence_product"}, {"loss_type": "vespo"}),
    "KL in the loss": ({"kl": KL}, {"beta": 0.1}),
    "unbiased KL": ({"kl": KL | {"unbiased": True}}, {"beta": 0.1, "args": {"use_bias_correction_kl": True}}),
    "top entropy": ({"entropy": {"quantile": 0.3}}, {"top_entropy_quantile": 0.3}),
    "entropy bonus": ({"entropy": {"coefficient": 0.05}}, {"_entropy_bonus_enabled": True, "entropy_coef": 0.05}),
    "OPSM": (MEANS | {"reject": {"opsm": 0.1}}, {"loss_type": "grpo", "off_policy_mask_threshold": 0.1}),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name: str) -> None:
    for seed in range(4):
        ours, theirs = CASES[name]
        step = step_of(seed)
        assert_equal(our_loss(step, **ours), trl_loss(step, **theirs))


@pytest.mark.parametrize("name", [name for name, (ours, _) in CASES.items() if "aggregate" in ours])
def test_empty_sample_does_not_count_where_trl_counts_it(name: str) -> None:
    ours, theirs = CASES[name]
    step = step_of(5, empty=True)
    samples, trained = len(step["mask"]), int(step["mask"].any(-1).sum())
    loss, gradient = our_loss(step, **ours)
    assert (samples, trained) == (6, 5)
    assert_equal((loss * trained / samples, gradient * trained / samples), trl_loss(step, **theirs))


@pytest.mark.parametrize("name", ["dapo", "cispo", "vespo", "top entropy"])
def test_empty_sample_changes_no_mean_over_tokens(name: str) -> None:
    ours, theirs = CASES[name]
    step = step_of(6, empty=True)
    assert_equal(our_loss(step, **ours), trl_loss(step, **theirs))


def test_ratio_beyond_e20_is_clamped_where_that_of_trl_explodes() -> None:
    step = step_of(7)
    step["new"][1, 0], step["advantages"][1] = step["old"][1, 0] + 25, -1.0
    tokens = float(step["mask"].sum())
    (loss, gradient), (their_loss, their_gradient) = our_loss(step), trl_loss(step)
    assert gradient[1, 0] == 0
    assert float(their_gradient[1, 0]) == pytest.approx(math.exp(25) / tokens)
    assert their_loss - loss == pytest.approx((math.exp(25) - math.exp(20)) / tokens)
    step["mask"][1, 0] = False
    assert_equal(our_loss(step), trl_loss(step))


def test_entropy_bonus_is_aggregated_as_the_policy_loss_where_that_of_trl_is_a_mean_over_tokens() -> None:
    step, coefficient = step_of(8), {"entropy": {"coefficient": 0.05}}
    mask, entropies = step["mask"], step["entropies"]
    bonus = our_loss(step, **MEANS)[0] - our_loss(step, **MEANS, **coefficient)[0]
    means = (entropies * mask).sum(-1) / mask.sum(-1)
    assert bonus == pytest.approx(0.05 * float(means.mean()))
    theirs = {"loss_type": "grpo", "entropy_coef": 0.05}
    of_trl = trl_loss(step, **theirs)[0] - trl_loss(step, **theirs, _entropy_bonus_enabled=True)[0]
    assert of_trl == pytest.approx(0.05 * float(entropies[mask].mean()))


def trl_weights(step: dict[str, Tensor], mode: str, low: float | None, high: float) -> Tensor:
    """Weights of TRL's correction, spread over tokens, 1 outside of the mask as in its token modes."""
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    known: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "self": trainer,
        "completion_mask": step["mask"].long(),
        "tool_mask": None,
        "old_per_token_logps": step["old"],
        "sampling_per_token_logps": step["rollout"],
    }
    statements = ast.walk(_function(FILE, "_generate_and_score_completions"))
    condition = "self.use_vllm and self.vllm_importance_sampling_correction"
    blocks = [n for n in statements if isinstance(n, ast.If) and ast.unparse(n.test) == condition]
    block = next(n for n in blocks if ast.unparse(n.body[0]).startswith("mask ="))
    exec(compile(ast.Module([block], []), FILE, "exec"), known)  # noqa: S102 the installed package's own code
    weights: Tensor = known["vllm_importance_sampling_ratio"]
    return weights.expand_as(step["new"])


@pytest.mark.parametrize(
    ("mode", "kind", "level", "low"),
    [
        ("token_truncate", "tis", "token", None),
        ("token_truncate", "tis", "token", 0.8),
        ("token_mask", "icepop", "token", 0.5),
        ("sequence_truncate", "tis", "sequence", None),
        ("sequence_truncate", "tis", "sequence", 0.8),
        ("sequence_mask", "icepop", "sequence", 0.5),
    ],
)
def test_correction_weights_are_those_of_trl(
    mode: str, kind: CorrectionKind, level: CorrectionLevel, low: float | None
) -> None:
    for seed in range(3):
        step = step_of(seed, empty=seed == 0)
        mask, theirs = step["mask"], trl_weights(step, mode, low, 1.5)
        ours = correction_weights(step["old"], step["rollout"], mask, kind=kind, level=level, low=low, high=1.5)
        torch.testing.assert_close(ours.weight[mask], theirs[mask], rtol=1e-12, atol=0)
        assert ours.bounded[mask].any()


@pytest.mark.parametrize("name", ["dapo", "grpo", "vespo"])
def test_corrected_loss_is_that_of_trl(name: str) -> None:
    ours, theirs = CASES[name]
    step = step_of(9)
    # TRL gives vespo weights of 1 outside of the mask, where its token modes have a difference of 0.
    step["weights"] = trl_weights(step, "token_truncate", None, 1.5)
    correction = {"correction": {"kind": "tis", "high": 1.5}}
    assert_equal(our_loss(step, **ours, **correction), trl_loss(step, **theirs, use_vllm=True))

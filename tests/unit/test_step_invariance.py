"""Loss and gradient of a step are the same for any cut into micro-batches, parts and ranks, for each preset's loss.

Steps, cuts and the sequences of each rank are generated; the step of `two_rows` is always among them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from torch.optim.optimizer import register_optimizer_step_pre_hook

from relax_actors.algorithms.losses import add_metrics
from relax_actors.algorithms.sequence_records import StepFacts
from relax_actors.algorithms.surrogates.preference import FORMULAS
from relax_actors.config import Config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.algorithm_parts import OVER_STEP
from relax_actors.config.presets import PRESETS
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.loss_inputs import LossInputs, ScoredTokens
from relax_actors.engines.torch.objective import StepObjective
from relax_actors.engines.torch.step_facts import (
    loss_inputs,
    needs_records,
    pack_records,
    record,
    step_facts,
    unpack_records,
)
from tests.support.batches import silent, two_rows
from tests.support.drawn_steps import STEPS, TOP_K, TWO_ROWS, Step, labelled
from tests.unit.test_masked_training import config_of

SETTINGS = (
    *("ratio", "surrogate", "clip_low", "clip_high", "dual_clip", "divergence", "ratio_cap", "tau_pos", "tau_neg"),
    *("gamma_pos", "gamma_neg", "covariance_share", "covariance_bounds", "covariance_coefficient"),
    *("second_moment_budget", "dro_beta"),
    *("log_ratio_penalty", "aggregate", "length", "proximal", "entropy", "correction", "reject"),
)
"""Settings of [algorithm] that the loss reads."""
MORE: dict[str, dict[str, Any]] = {
    "product ratio": {"ratio": "sequence_product", "aggregate": "sample_mean_of_means"},
    "entropy": {"entropy": {"coefficient": 0.1, "quantile": 0.4}},
    "geometric mean of top entropy": {
        "surrogate": "geometric",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "aggregate": "sample_mean_of_means",
        "entropy": {"quantile": 0.4},
    },
    "unbiased KL": {"kl": {"place": "loss", "coefficient": 0.1, "unbiased": True, "clamp": 0.5, "k2_gradient": True}},
    "normalised weights": {
        "proximal": "trainer",
        "correction": {"kind": "tis", "level": "sequence", "high": 3.0, "normalise": "samples"},
    },
    "normalised score": {"surrogate": "score", "correction": {"kind": "importance", "normalise": "tokens"}},
    "distillation at sampled tokens": {"distil": {"place": "loss", "coefficient": 0.5}},
    "distillation": {
        "distil": {"place": "loss", "kind": "jsd", "top_k": TOP_K, "teacher_weight": 0.3},
        "aggregate": "sample_mean_of_means",
    },
    **{
        f"pairs: {loss}": {
            **PRESETS["dpo"].settings,
            "pairs": {"losses": {loss: 1.0}, "label_smoothing": 0.1, "beta": 0.5},
        }
        for loss in FORMULAS
    },
    "imitation": {"positive_nll": 0.5},
    "observations": {"observation_nll": 0.5, "positive_nll": 0.5, "kl": {"place": "loss", "coefficient": 0.1}},
    "observations beside means of samples": {
        **PRESETS["grpo"].settings,
        "observation_nll": 0.5,
        "reject": {"kind": "geometric", "low": 0.9, "high": 1.2, "counted": True},
    },
    "centred scores": {**PRESETS["reward_model"].settings, "scores": {"centring": 0.3}},
    "three classes": {**PRESETS["outcome_reward"].settings, "scores": {"classes": 3}},
    "prompt mean": {"aggregate": "prompt_mean", "reject": {"kind": "k3", "max_kl": 0.02}},
    "prompt mean of all": {"aggregate": "prompt_mean", "reject": {"kind": "k2", "max_kl": 0.02, "counted": True}},
    "absolute KL": {"kl": {"place": "loss", "kind": "abs", "coefficient": 0.1}},
    "bounded weights": {
        "proximal": "trainer",
        "correction": {"kind": "tis", "low": 0.9, "high": 1.1},
        "reject": {"kind": "geometric", "low": 0.9, "high": 1.2, "counted": True},
    },
    "weighted pairs": {**PRESETS["dpo"].settings, "pairs": {"weighted": True, "beta": 0.5}},
    "pairs: AOT of desensitised lengths, with a divergence": {
        **PRESETS["dpo"].settings,
        "pairs": {
            "losses": {"aot": 1.0, "aot_unpaired": 0.5, "sft": 0.5, "sigmoid": 1.0},
            "ld_alpha": 0.3,
            "f_divergence": "js",
            "beta": 0.5,
        },
    },
    "OPSM": {"reject": {"kind": "product", "low": 0.0, "high": 1e9, "opsm": 0.1}, "aggregate": "sample_mean_of_sums"},
}


def losses() -> dict[str, dict[str, Any]]:
    """Return different settings of the loss by the first preset that has them."""
    found: dict[str, dict[str, Any]] = {}
    for name, preset in PRESETS.items():
        chosen = {key: value for key, value in preset.settings.items() if key in SETTINGS}
        if preset.settings.get("kl", {}).get("place") == "loss":
            chosen["kl"] = preset.settings["kl"]
        if preset.settings.get("head") == "scores":
            chosen |= {key: preset.settings[key] for key in ("rows", "head", "scores") if key in preset.settings}
        if chosen.get("aggregate") == "constant":
            chosen["length"] = 5
        found.setdefault(json.dumps(chosen, sort_keys=True), {"name": name, **chosen})
    return {chosen.pop("name"): chosen for chosen in found.values()} | MORE


@cache
def base(folder: Path) -> Config:
    return config_of(folder, trainer={"max_tokens_per_microbatch": 200})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return base(tmp_path_factory.mktemp("model"))


def step_of(
    config: Config, budget: int, chosen: dict[str, Any], samples: list[TrainSample], *, by_row: bool = False
) -> tuple[float, torch.Tensor]:
    """Return the loss of a step and its gradient, flat."""
    algorithm = AlgorithmSection.model_validate(chosen)
    trainer = config.trainer.model_copy(update={"max_tokens_per_microbatch": budget})
    engine = TorchEngine(config.model_copy(update={"algorithm": algorithm, "trainer": trainer}))
    engine.initialise(5)
    rows = range(samples[-1].row + 1)
    parts = [[sample for sample in samples if sample.row == row] for row in rows] if by_row else [samples]
    for part in parts:
        engine.accumulate(part, silent)
    captured: list[torch.Tensor] = []

    def capture(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            captured.extend(p.grad.flatten().clone() for p in group["params"] if p.grad is not None)

    hook = register_optimizer_step_pre_hook(capture)
    try:
        metrics = engine.step(0, silent).metrics
    finally:
        hook.remove()
    return float(metrics["loss"]), torch.cat(captured)


# Losses of a pair differ in a function of the same sums: the test of ranks covers each, and here one of each kind does.
OF_MODEL = [name for name in losses() if name.removeprefix("pairs: ") not in {*FORMULAS} - {"sigmoid", *OVER_STEP}]


@pytest.mark.parametrize("name", OF_MODEL)
@settings(max_examples=2)
@given(STEPS)
@example(TWO_ROWS)
def test_loss_and_gradient_do_not_depend_on_the_cut(config: Config, name: str, step: Step) -> None:
    chosen = losses()[name]
    samples = labelled(step.samples(), chosen)
    loss, gradient = step_of(config, 200, chosen, samples)
    assert gradient.any() or bool(step.sequences)
    other, cut = step_of(config, step.budget, chosen, samples, by_row=step.by_row)
    assert other == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert float((cut - gradient).abs().max()) <= 1e-6 * max(1.0, float(gradient.abs().max()))


class Rank:
    """A data-parallel rank that holds the log-probs of all sequences as its parameters, float64.

    `top` are those of the teacher's most likely tokens, `[sequences, width, k]`.
    """

    def __init__(self, chosen: dict[str, Any], samples: list[TrainSample]) -> None:
        algorithm = AlgorithmSection.model_validate(chosen)
        self.objective, self.samples = StepObjective(algorithm), samples
        self.classes = algorithm.scores.classes if algorithm.trains_scores else 0
        self.has_top = algorithm.distil.place == "loss" and algorithm.distil.top_k is not None
        random = torch.Generator().manual_seed(3)
        width = max(sample.trained for sample in samples)
        rollout = torch.zeros(len(samples), width, dtype=torch.float64)
        for row, sample in enumerate(samples):
            rollout[row, : sample.trained] = torch.from_numpy(sample.masked("logprobs").astype(np.float64))
        self.logprobs = (rollout + 0.2 * torch.randn(rollout.shape, generator=random)).requires_grad_()
        top = torch.randn(*rollout.shape, TOP_K + 1, generator=random, dtype=torch.float64).log_softmax(-1)
        self.top = top[..., :TOP_K].clone().requires_grad_()
        self.entropies = torch.rand(len(samples), width, generator=random, dtype=torch.float64)
        self.measured: list[dict[str, float]] = []

    def inputs(self, indices: list[int], facts: StepFacts | None = None) -> LossInputs:
        """Inputs of the micro-batch of some sequences."""
        chosen = [self.samples[index] for index in indices]
        width = max(sample.trained for sample in chosen)
        mask = torch.arange(width) < torch.tensor([[sample.trained] for sample in chosen])

        def padded(arrays: Any) -> torch.Tensor:
            rows = [torch.from_numpy(np.asarray(array, np.float64)) for array in arrays]
            found = torch.zeros((*mask.shape, *rows[0].shape[1:]), dtype=torch.float64)
            for row, array in enumerate(rows):
                found[row, : len(array)] = array
            return found

        top = self.top[indices, :width] if self.has_top else None
        squares, own = self.entropies[indices, :width] + 0.1, self.logprobs[indices, :width]
        scores = own.unsqueeze(-1) * torch.arange(1.0, self.classes + 1) if self.classes else None
        scored = ScoredTokens(own, self.entropies[indices, :width], top, squares, scores)
        return loss_inputs(self.objective, chosen, scored, mask, padded, facts=facts, indices=indices)

    def records(self, micro_batches: list[list[int]]) -> list[dict[str, Any]]:
        """Message to the other ranks."""
        found: dict[int, Any] = {}
        for indices in micro_batches:
            found |= record(self.objective, self.inputs(indices), indices)
        return pack_records(found)

    def train(self, micro_batches: list[list[int]], facts: StepFacts | None) -> None:
        for indices in micro_batches:
            loss, measured = self.objective.loss(self.inputs(indices, facts))
            loss.backward()
            self.measured.append(measured)


def shared_step(
    chosen: dict[str, Any], samples: list[TrainSample], shares: list[list[list[int]]]
) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of a step whose micro-batches are shared by ranks."""
    ranks = [Rank(chosen, samples) for _ in shares]
    facts = None
    if needs_records(ranks[0].objective, samples):
        messages = [message for rank, share in zip(ranks, shares, strict=True) for message in rank.records(share)]
        facts = step_facts(ranks[0].objective, samples, unpack_records(messages), seed=11)
    for rank, share in zip(ranks, shares, strict=True):
        rank.train(share, facts)
    measured = add_metrics(part for rank in ranks for part in rank.measured)
    scale = ranks[0].objective.gradient_scale(measured)
    leaves = [(rank.logprobs, rank.top) for rank in ranks]
    gradients = [[torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in pair] for pair in leaves]
    whole = torch.stack([torch.cat([part.flatten() for part in pair]) for pair in gradients]).sum(0)
    return measured["loss"] * scale, whole * scale


@pytest.mark.parametrize("name", losses())
@settings(max_examples=3)
@given(STEPS)
@example(TWO_ROWS)
def test_loss_and_gradient_do_not_depend_on_the_ranks_that_share_a_step(name: str, step: Step) -> None:
    chosen = losses()[name]
    samples = labelled(step.samples(), chosen)
    loss, gradient = shared_step(chosen, samples, [[list(range(len(samples)))]])
    assert gradient.any() or bool(step.sequences)
    other, of_ranks = shared_step(chosen, samples, step.shares())
    assert other == pytest.approx(loss, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(of_ranks, gradient, rtol=1e-6, atol=1e-6)


def test_geometric_mean_of_top_entropy_is_that_of_these_tokens_alone() -> None:
    name = "geometric mean of top entropy"
    samples = two_rows()
    loss, gradient = shared_step(MORE[name], samples, [[[0, 2, 4], [1, 3, 5]]])
    rank = Rank(MORE[name], samples)
    whole = rank.inputs(list(range(len(samples))))
    assert whole.entropies is not None
    kept = whole.mask & (whole.entropies >= whole.entropies[whole.mask].quantile(0.6))
    delta = whole.logprobs - whole.rollout
    bounded = torch.where(whole.advantages > 0, delta.clamp(max=0.4), delta.clamp(min=-0.4))
    expected = []
    for sample in sorted({(one.row, one.sample) for one in samples}):
        rows = [i for i, one in enumerate(samples) if (one.row, one.sample) == sample]
        chosen = torch.zeros_like(kept)
        chosen[rows] = kept[rows]
        assert chosen.any()
        expected.append((-whole.advantages[chosen] * bounded[chosen].mean().exp()).mean())
    mean = torch.stack(expected).mean()
    (of_mean,) = torch.autograd.grad(mean, rank.logprobs)
    assert loss == pytest.approx(float(mean.detach()), rel=1e-6)
    # Behind those of the log-probs are the gradients of the tokens of a teacher.
    torch.testing.assert_close(gradient[: of_mean.numel()], of_mean.flatten(), rtol=1e-6, atol=1e-6)

"""Loss and gradient of a step are the same for any cut into micro-batches, parts and ranks, for each preset's loss."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from relax_actors.algorithms.first_pass import StepFacts
from relax_actors.algorithms.losses import add_metrics
from relax_actors.config import Config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.presets import PRESETS
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.loss_inputs import LossInputs
from relax_actors.engines.torch.objective import ScoredTokens, StepObjective
from relax_actors.engines.torch.step_facts import (
    loss_inputs,
    needs_first_pass,
    pack_records,
    record,
    step_facts,
    unpack_records,
)
from tests.support.batches import two_rows
from tests.unit.test_masked_training import config_of, nothing

SETTINGS = (
    *("ratio", "surrogate", "clip_low", "clip_high", "dual_clip", "divergence", "ratio_cap", "tau_pos", "tau_neg"),
    *("gamma_pos", "gamma_neg", "covariance_share", "covariance_bounds", "covariance_coefficient"),
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
    "OPSM": {"reject": {"kind": "product", "low": 0.0, "high": 1e9, "opsm": 0.1}, "aggregate": "sample_mean_of_sums"},
}


def losses() -> dict[str, dict[str, Any]]:
    """Return different settings of the loss by the first preset that has them."""
    found: dict[str, dict[str, Any]] = {}
    for name, preset in PRESETS.items():
        settings = {key: value for key, value in preset.settings.items() if key in SETTINGS}
        if preset.settings.get("kl", {}).get("place") == "loss":
            settings["kl"] = preset.settings["kl"]
        if settings.get("aggregate") == "constant":
            settings["length"] = 5
        found.setdefault(json.dumps(settings, sort_keys=True), {"name": name, **settings})
    return {settings.pop("name"): settings for settings in found.values()} | MORE


@cache
def base(folder: Path) -> Config:
    return config_of(folder, trainer={"max_tokens_per_microbatch": 200})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return base(tmp_path_factory.mktemp("model"))


def step_of(config: Config, budget: int, settings: dict[str, Any], *, parts: int = 1) -> tuple[float, torch.Tensor]:
    """Return the loss of a step and its gradient, flat."""
    algorithm = AlgorithmSection.model_validate(settings)
    trainer = config.trainer.model_copy(update={"max_tokens_per_microbatch": budget})
    engine = TorchEngine(config.model_copy(update={"algorithm": algorithm, "trainer": trainer}))
    engine.initialise(5)
    samples = two_rows()
    size = len(samples) // parts
    for start in range(0, len(samples), size):
        engine.accumulate(samples[start : start + size], nothing)
    captured: list[torch.Tensor] = []

    def capture(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            captured.extend(p.grad.flatten().clone() for p in group["params"] if p.grad is not None)

    hook = register_optimizer_step_pre_hook(capture)
    try:
        metrics = engine.step(0, nothing).metrics
    finally:
        hook.remove()
    return float(metrics["loss"]), torch.cat(captured)


@pytest.mark.parametrize("name", losses())
def test_loss_and_gradient_do_not_depend_on_the_cut(config: Config, name: str) -> None:
    settings = losses()[name]
    loss, gradient = step_of(config, 200, settings)
    assert gradient.any()
    # Each sequence in a micro-batch of its own, each row in a part of its own.
    other, cut = step_of(config, 14, settings, parts=2)
    assert other == pytest.approx(loss, rel=1e-6, abs=1e-6)
    assert float((cut - gradient).abs().max()) <= 1e-6 * max(1.0, float(gradient.abs().max()))


class Rank:
    """A data-parallel rank that holds the log-probs of all sequences as its parameters, float64."""

    def __init__(self, settings: dict[str, Any], samples: list[TrainSample]) -> None:
        self.objective, self.samples = StepObjective(AlgorithmSection.model_validate(settings)), samples
        random = torch.Generator().manual_seed(3)
        width = max(sample.trained for sample in samples)
        rollout = torch.zeros(len(samples), width, dtype=torch.float64)
        for row, sample in enumerate(samples):
            rollout[row, : sample.trained] = torch.from_numpy(sample.masked("logprobs").astype(np.float64))
        self.logprobs = (rollout + 0.2 * torch.randn(rollout.shape, generator=random)).requires_grad_()
        self.entropies = torch.rand(len(samples), width, generator=random, dtype=torch.float64)
        self.measured: list[dict[str, float]] = []

    def inputs(self, indices: list[int], facts: StepFacts | None = None) -> LossInputs:
        """Inputs of the micro-batch of some sequences."""
        chosen = [self.samples[index] for index in indices]
        width = max(sample.trained for sample in chosen)
        mask = torch.arange(width) < torch.tensor([[sample.trained] for sample in chosen])

        def padded(arrays: Any) -> torch.Tensor:
            found = torch.zeros(mask.shape, dtype=torch.float64)
            for row, array in enumerate(arrays):
                found[row, : len(array)] = torch.from_numpy(np.asarray(array, np.float64))
            return found

        scored = ScoredTokens(self.logprobs[indices, :width], self.entropies[indices, :width])
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


def shared_step(settings: dict[str, Any], shares: list[list[list[int]]]) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of a step whose micro-batches are shared by ranks."""
    samples = two_rows()
    ranks = [Rank(settings, samples) for _ in shares]
    facts = None
    if needs_first_pass(ranks[0].objective, samples):
        messages = [message for rank, share in zip(ranks, shares, strict=True) for message in rank.records(share)]
        facts = step_facts(ranks[0].objective, samples, unpack_records(messages), seed=11)
    for rank, share in zip(ranks, shares, strict=True):
        rank.train(share, facts)
    measured = add_metrics(part for rank in ranks for part in rank.measured)
    scale = ranks[0].objective.gradient_scale(measured)
    gradients = [rank.logprobs.grad for rank in ranks if rank.logprobs.grad is not None]
    return measured["loss"] * scale, torch.stack(gradients).sum(0) * scale


@pytest.mark.parametrize("name", losses())
def test_loss_and_gradient_do_not_depend_on_the_ranks_that_share_a_step(name: str) -> None:
    settings = losses()[name]
    loss, gradient = shared_step(settings, [[[0, 1, 2, 3, 4, 5]]])
    # The two sequences of each sample are on different ranks.
    other, of_ranks = shared_step(settings, [[[5, 0], [3]], [[1, 2, 4]]])
    assert gradient.any()
    assert other == pytest.approx(loss, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(of_ranks, gradient, rtol=1e-6, atol=1e-6)


def test_geometric_mean_of_top_entropy_is_that_of_these_tokens_alone() -> None:
    name = "geometric mean of top entropy"
    loss, gradient = shared_step(MORE[name], [[[0, 2, 4], [1, 3, 5]]])
    samples = two_rows()
    rank = Rank(MORE[name], samples)
    given = rank.inputs(list(range(len(samples))))
    assert given.entropies is not None
    kept = given.mask & (given.entropies >= given.entropies[given.mask].quantile(0.6))
    delta = given.logprobs - given.rollout
    bounded = torch.where(given.advantages > 0, delta.clamp(max=0.4), delta.clamp(min=-0.4))
    expected = []
    for sample in sorted({(one.row, one.sample) for one in samples}):
        rows = [i for i, one in enumerate(samples) if (one.row, one.sample) == sample]
        chosen = torch.zeros_like(kept)
        chosen[rows] = kept[rows]
        assert chosen.any()
        expected.append((-given.advantages[chosen] * bounded[chosen].mean().exp()).mean())
    mean = torch.stack(expected).mean()
    (of_mean,) = torch.autograd.grad(mean, rank.logprobs)
    assert loss == pytest.approx(float(mean.detach()), rel=1e-6)
    torch.testing.assert_close(gradient, of_mean, rtol=1e-6, atol=1e-6)

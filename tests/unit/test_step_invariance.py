"""Loss and gradient of a step are the same for any cut into micro-batches and parts, for the loss of each preset."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from relax_actors.config import Config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.config.presets import PRESETS
from relax_actors.engines.protocols import TrainSample
from relax_actors.engines.torch.engine import TorchEngine
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


def batch() -> list[TrainSample]:
    """Draw 6 sequences with random masks in 2 rows; the first sample of each row has two sequences."""
    random, found = np.random.default_rng(1), []
    for i, length in enumerate((9, 14, 6, 11, 8, 12)):
        mask = random.random(length) < 0.5
        mask[0], mask[-1] = False, True
        found.append(
            TrainSample(
                random.integers(0, 12, length).astype(np.int32),
                mask,
                logprobs=random.uniform(-3, -1.5, length).astype(np.float32),
                advantages=np.full(length, random.normal(), np.float32),
                reference_logprobs=random.uniform(-3, -2, length).astype(np.float32),
                row=i // 3,
                sample=max(0, i % 3 - 1),
            )
        )
    for i in (1, 4):  # one advantage a sample
        found[i] = found[i].with_advantages(np.full(len(found[i]), found[i - 1].advantages[0]))
    tokens = {(s.row, s.sample): 0 for s in found}
    for s in found:
        tokens[s.row, s.sample] += s.trained
    return [replace(s, sample_tokens=tokens[s.row, s.sample]) for s in found]


def step_of(config: Config, budget: int, settings: dict[str, Any], *, parts: int = 1) -> tuple[float, torch.Tensor]:
    """Return the loss of a step and its gradient, flat."""
    algorithm = AlgorithmSection.model_validate(settings)
    trainer = config.trainer.model_copy(update={"max_tokens_per_microbatch": budget})
    engine = TorchEngine(config.model_copy(update={"algorithm": algorithm, "trainer": trainer}))
    engine.initialise(5)
    samples = batch()
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

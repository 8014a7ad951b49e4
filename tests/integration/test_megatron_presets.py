"""Two Megatron-Core ranks compute the loss and the gradient of the torch engine, for each preset's loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_actors.config import Config
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.weights import files as weights
from tests.support.megatron_pair import train_cases, trained_once
from tests.support.tiny_megatron import DENSE, config_of, skip_if_missing
from tests.unit.test_step_invariance import losses

skip_if_missing()

# Every loss that distils reads the vocabulary, which two tensor-parallel ranks share.
DISTILLED: dict[str, dict[str, Any]] = {
    "sampled tokens": {},
    "forward KL": {"kind": "forward_kl", "top_k": 4},
    "reverse KL, renormalised": {"kind": "reverse_kl", "top_k": 4, "tail": "renormalise"},
    "JSD": {"kind": "jsd", "top_k": 3, "teacher_weight": 0.3},
}
DISTILLING: dict[str, dict[str, Any]] = {
    name: {"distil": {"place": "loss", "coefficient": 1.0, **settings}} for name, settings in DISTILLED.items()
}
WITH_ENTROPY = {"JSD and entropy": {**DISTILLING["JSD"], "entropy": {"coefficient": 0.1}}}
OBSERVING = {"observations": losses()["observations"]}
# Reward models are trained by the torch engine alone.
OF_POLICY = {name: settings for name, settings in losses().items() if settings.get("head") != "scores"}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "dp2": ({}, OF_POLICY | DISTILLING | WITH_ENTROPY),
    "tp2": ({"tensor_parallel": 2}, DISTILLING | WITH_ENTROPY | OBSERVING | {"grpo": {}}),
    "tp2_sp": ({"tensor_parallel": 2, "sequence_parallel": True}, DISTILLING),
    "cp2": ({"context_parallel": 2}, DISTILLING | WITH_ENTROPY),
    "pp2": ({"pipeline_parallel": 2}, DISTILLING),
}
# An update of AdamW is learning_rate * g / (|g| + epsilon), so that weights differ as gradients do.
SMOOTH = {"learning_rate": 1.0, "epsilon": 1.0, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 30}


def cases_of(folder: Path, layout: dict[str, Any], settings: dict[str, dict[str, Any]]) -> dict[str, Config]:
    config = config_of(folder, DENSE, trainer={**SMOOTH, "megatron": {"ranks": 2, **layout}})
    return {
        name: config.model_copy(update={"algorithm": AlgorithmSection.model_validate(found)})
        for name, found in settings.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_compute_loss_and_gradient_of_the_torch_engine(tmp_path: Path, name: str) -> None:
    layout, settings = LAYOUTS[name]
    cases, folder = cases_of(tmp_path / "model", layout, settings), tmp_path / "ranks"
    folder.mkdir()
    found = train_cases(folder, list(cases.values()))
    for (case, config), (metrics, tensors) in zip(cases.items(), found, strict=True):
        alone = trained_once(TorchEngine(config), config, tmp_path / "alone")
        assert metrics["loss"] == pytest.approx(alone["loss"], rel=1e-5, abs=1e-6), case
        assert metrics["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4), case
        expected = weights.load([tmp_path / "alone"])
        difference = max(float((tensors[n] - expected[n]).abs().max()) for n in expected)
        assert difference < 1e-5, case

"""Reward models in the Megatron engine: the weights, scores and folders of the torch engine, for every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.config import Config
from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.ranks.group import TrainerGroup
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.scorer import TorchScorer
from relax_actors.weights import files as weights_files
from tests.conformance.base.training_engine import begun, silent
from tests.support.adapters import adapter_config, base_folder
from tests.support.score_batches import media_pairs, score_batch
from tests.support.tiny_megatron import (
    DENSE,
    LLAMA,
    MOE,
    config_of,
    media_architecture,
    ranks_of,
    skip_if_missing,
)
from tests.support.trained_engines import max_difference, weights_of

skip_if_missing()

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 not before the check
from relax_actors.engines.megatron.mcore.scorer import MegatronScorer  # noqa: E402 not before the check

KINDS = {"reward_model": ("pairs", 1), "outcome_reward": ("labelled", 3), "process_reward": ("steps", 2)}
# One update is g / (|g| + 1) of AdamW, so that weights are as far apart as gradients.
SMOOTH = {"learning_rate": 1.0, "epsilon": 1.0, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 256}
CASES = {
    "pairs": ("reward_model", DENSE),
    "classes": ("outcome_reward", LLAMA),
    "steps": ("process_reward", MOE),
    "pictures": ("reward_model", media_architecture("qwen3_vl")),
    "omni": ("reward_model", media_architecture("qwen2_5_omni_thinker")),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("classes", {"tensor_parallel": 2}),
    "tp2_sp": ("steps", {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": ("pairs", {"pipeline_parallel": 2}),
    "dp2": ("pairs", {}),
    "cp2": ("classes", {"context_parallel": 2}),
    "pictures_tp2": ("pictures", {"tensor_parallel": 2}),
    "pictures_pp2": ("pictures", {"pipeline_parallel": 2}),
}
TOLERANCE = 1e-5
"""Of weights and scores near 1 in float32, whose sums two engines add up in other orders."""


def configured(case: str, folder: Path, backend: str, **trainer: Any) -> Config:
    name, architecture = CASES[case]
    algorithm = {"name": name, "scores": {"classes": KINDS[name][1]}}
    return config_of(folder, architecture, algorithm=algorithm, trainer={**SMOOTH, "backend": backend, **trainer})


def batch_for(case: str, config: Config, seed: int = 2) -> list[TrainSample]:
    rows, classes = KINDS[CASES[case][0]]
    return media_pairs(config) if config.media is not None else score_batch(rows, classes, seed)


@pytest.mark.parametrize("case", CASES)
def test_gradients_scores_and_folder_are_those_of_the_torch_engine(tmp_path: Path, case: str) -> None:
    found = []
    kinds: dict[str, Any] = {"torch": (TorchEngine, TorchScorer), "megatron": (MegatronEngine, MegatronScorer)}
    for backend, (engine_of, scorer_of) in kinds.items():
        config = configured(case, tmp_path / backend, backend)
        batch = batch_for(case, config)
        engine = begun(engine_of(config))
        first, metrics = engine.fingerprint(), dict(train(engine, batch, 0, silent).metrics)
        weights = weights_of(engine, tmp_path / f"{backend}.safetensors")
        scorer = scorer_of(config)
        scorer.load(1, engine.fingerprint(), [tmp_path / f"{backend}.safetensors"])
        engine.export(tmp_path / backend / "model")
        found.append((first, metrics, weights, scorer.score(batch, silent)))
    (first, metrics, weights, scores), (own_first, own_metrics, own_weights, own_scores) = found
    assert own_first == first
    for name in metrics.keys() - {"micro_batches"}:
        assert own_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=TOLERANCE), name
    assert max_difference(own_weights, weights) < TOLERANCE
    for own, expected in zip(own_scores, scores, strict=True):
        np.testing.assert_allclose(own, expected, atol=TOLERANCE)
    config = configured(case, tmp_path / "again", "torch")
    for backend in kinds:
        path = tmp_path / backend / "model"
        again = begun(TorchEngine(config.model_copy(update={"model": config.model.model_copy(update={"path": path})})))
        assert max_difference(weights_of(again, tmp_path / "again.safetensors"), weights) < TOLERANCE


def test_reward_model_begins_with_the_body_of_a_policy_and_an_adapter_trains_its_head(tmp_path: Path) -> None:
    base, found = base_folder(tmp_path, DENSE), []
    for backend, engine_of in {"torch": TorchEngine, "megatron": MegatronEngine}.items():
        config = adapter_config(
            tmp_path / backend, base, trainer={**SMOOTH, "backend": backend}, algorithm={"name": "reward_model"}
        )
        whole = begun(engine_of(config.model_copy(update={"lora": None})))
        adapter = begun(engine_of(config))
        train(adapter, batch_for("pairs", config), 0, silent)
        path = tmp_path / f"{backend}.safetensors"
        found.append((whole.fingerprint(), weights_of(adapter, path)))
    (first, weights), (own_first, own_weights) = found
    assert own_first == first
    assert any(name.startswith("score") for name in own_weights)
    assert max_difference(own_weights, weights) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_the_reward_model_of_one_process(tmp_path: Path, layout: str) -> None:
    case, section = LAYOUTS[layout]
    expected = begun(TorchEngine(configured(case, tmp_path / "one", "torch")))
    group = TrainerGroup(configured(case, tmp_path / "two", "megatron", **ranks_of(section)), lambda *_: None)
    try:
        engine = begun(group)
        assert engine.fingerprint() == expected.fingerprint()
        for step in range(2):
            batch = batch_for(case, configured(case, tmp_path / "one", "torch"), step)
            losses = [train(each, batch, step, silent).metrics["loss"] for each in (engine, expected)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        engine.export(tmp_path / "shared")
        expected.export(tmp_path / "alone")
    finally:
        group.close()
    files = [sorted((tmp_path / name).glob("model*.safetensors")) for name in ("shared", "alone")]
    own, other = map(weights_files.load, files)
    # Two steps, whose second gradient is taken at weights that differ by rounding already.
    assert max_difference(own, other) < 10 * TOLERANCE

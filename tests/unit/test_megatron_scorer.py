"""All engines give the same log-probs for the same tokens; Megatron-Core as a scoring engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.errors import StoreError
from relax_actors.config import Config
from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import copy_into
from relax_actors.engines.torch.scorer import TorchScorer
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.errors import ConfigError
from relax_actors.weights import files as weights
from relax_actors.weights.protocols import WeightUpdate
from tests.support.batches import batch_of, batch_of_generations, routed, silent
from tests.support.tiny_megatron import DENSE, LLAMA, MOE, config_of, skip_if_missing
from tests.support.trained_engines import started
from tests.unit.test_engines import REQUESTS

skip_if_missing()

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 after the check
from relax_actors.engines.megatron.mcore.scorer import MegatronScorer  # noqa: E402

Arrays = list[Any]


def published(engine: Any, path: Path) -> tuple[str, list[Path]]:
    return engine.publish(path), [path]


def max_difference(one: Arrays, other: Arrays) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def generated(config: Config, trainer: Any, tmp_path: Path, *, experts: bool) -> list[TrainSample]:
    """Sequences that the rollout engine generated with the trainer's weights."""
    rollout = TransformersEngine(config.model_path, records_experts=experts)
    rollout.load(0, *published(trainer, tmp_path / "rollout.safetensors"))
    pairs = [(r, g) for r, group in zip(REQUESTS, rollout.generate(REQUESTS, silent), strict=True) for g in group]
    batch = batch_of_generations(pairs)
    return [replace(sample, routed_experts=g.routed_experts) for sample, (_, g) in zip(batch, pairs, strict=True)]


@pytest.mark.parametrize(
    ("architecture", "replays", "tolerance"),
    [(DENSE, False, 1e-5), (LLAMA, False, 1e-5), (MOE, False, 5e-5), (MOE, True, 5e-5)],
    ids=["qwen3", "llama", "qwen3_moe", "qwen3_moe replayed"],
)
def test_all_engines_give_same_logprobs(
    tmp_path: Path, architecture: dict[str, Any], tolerance: float, *, replays: bool
) -> None:
    config = config_of(tmp_path, architecture, trainer={"learning_rate": 1e-2, "router_replay": replays})
    megatron, beside = started(MegatronEngine(config)), started(TorchEngine(config))
    for step in range(3):  # initial weights give a nearly uniform distribution, which would hide errors
        train(megatron, batch_of(step), step, silent)
    moved = published(megatron, tmp_path / "moved.safetensors")
    batch = generated(config, megatron, tmp_path, experts=replays)
    found = {}
    for name, scorer in (("torch", TorchScorer(config)), ("megatron", MegatronScorer(config))):
        scorer.load(1, *moved)
        found[name] = scorer.score(batch, silent)
        assert [len(scored) for scored in found[name]] == [len(sample) for sample in batch]
        assert max_difference(found[name], [sample.logprobs for sample in batch]) < tolerance
    assert max_difference(found["torch"], found["megatron"]) < tolerance
    copy_into(beside.model, weights.load(moved[1]), "megatron")
    for trainer in (megatron, beside):
        measured = train(trainer, batch, 3, silent).metrics
        assert abs(measured["max_ratio"] - 1) < tolerance


def test_weights_are_staged_without_changing_scores_until_swap(tmp_path: Path) -> None:
    config = config_of(tmp_path, MOE)
    trainer = started(MegatronEngine(config))
    scorer, batch = MegatronScorer(config), batch_of(0)
    with pytest.raises(StoreError, match="no verified weights"):
        scorer.score(batch, silent)
    scorer.load(0, *published(trainer, tmp_path / "0.safetensors"))
    first = scorer.score(batch, silent)
    train(trainer, batch_of(0), 0, silent)
    copy = scorer.empty_copy()
    fingerprint, shards = published(trainer, tmp_path / "1.safetensors")
    copy.apply([WeightUpdate(1, fingerprint, shards)])
    scorer.stage(1, copy.tensors)
    assert max_difference(first, scorer.score(batch, silent)) == 0
    assert (scorer.version, scorer.swap(), scorer.version) == (0, 1, 1)
    second = scorer.score(batch, silent)
    assert max_difference(first, second) > 1e-3
    assert max_difference(second, scorer.score(batch, silent)) == 0
    with pytest.raises(ConfigError, match="have no tensor"):
        scorer.stage(2, {name: tensor for name, tensor in copy.tensors.items() if "q_norm" not in name})


def test_scorer_replays_recorded_experts(tmp_path: Path) -> None:
    config = config_of(tmp_path, MOE, trainer={"router_replay": True})
    trainer, batch = started(MegatronEngine(config)), routed(batch_of(0), 0, MOE)
    found = []
    for scorer in (TorchScorer(config), MegatronScorer(config)):
        scorer.load(0, *published(trainer, tmp_path / "0.safetensors"))
        found.append(scorer.score(batch, silent))
        assert max_difference(found[-1], scorer.score(batch_of(0), silent)) > 1e-3
    assert max_difference(*found) < 5e-5


@pytest.mark.parametrize("architecture", [DENSE, MOE], ids=["qwen3", "qwen3_moe"])
def test_sums_of_squared_probabilities_are_those_of_torch(tmp_path: Path, architecture: dict[str, Any]) -> None:
    config = config_of(tmp_path, architecture, rollout={"temperature": 0.7}, trainer={"learning_rate": 0.05})
    trainer = started(MegatronEngine(config))
    for step in range(3):  # initial weights give a nearly uniform distribution, which would hide errors
        train(trainer, batch_of(step), step, silent)
    moved, batch = published(trainer, tmp_path / "moved.safetensors"), batch_of(9)
    found = []
    for scorer in (TorchScorer(config), MegatronScorer(config)):
        scorer.load(1, *moved)
        found.append(scorer.squares(batch, silent))
    assert [len(squares) for squares in found[1]] == [len(sample) for sample in batch]
    assert max_difference(*found) < 1e-5
    assert max(float(squares.max()) for squares in found[1]) > 0.1


@pytest.mark.parametrize("k", [0, 4])
def test_most_likely_tokens_are_those_of_torch(tmp_path: Path, k: int) -> None:
    config = config_of(tmp_path, DENSE, rollout={"temperature": 0.7}, trainer={"learning_rate": 0.05})
    trainer = started(MegatronEngine(config))
    for step in range(3):
        train(trainer, batch_of(step), step, silent)
    moved, batch = published(trainer, tmp_path / "moved.safetensors"), batch_of(9)
    found = []
    for scorer in (TorchScorer(config), MegatronScorer(config)):
        scorer.load(1, *moved)
        found.append(scorer.score_top(batch, k, silent))
    for sample, torch_scores, megatron_scores in zip(batch, *found, strict=True):
        assert megatron_scores.top_ids.shape == (sample.trained, k)
        np.testing.assert_allclose(megatron_scores.logprobs, torch_scores.logprobs, atol=1e-5)
        np.testing.assert_array_equal(megatron_scores.top_ids, torch_scores.top_ids)
        np.testing.assert_allclose(megatron_scores.top_logprobs, torch_scores.top_logprobs, atol=1e-5)

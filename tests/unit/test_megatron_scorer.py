"""The same log-probs of the same tokens, whichever engine computes them; and Megatron-Core as an engine that scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.errors import StoreError
from relax_actors.config import Config
from relax_actors.engines.protocols import Sequences, TrainBatch, train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import copy_into
from relax_actors.engines.torch.scorer import TorchScorer
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.errors import ConfigError
from relax_actors.weights import files as weights
from relax_actors.weights.protocols import WeightUpdate
from tests.support.tiny_megatron import DENSE, LLAMA, MOE, batch_of, config_of, routed, skip_if_missing
from tests.unit.test_engines import REQUESTS

skip_if_missing()

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 not before the check
from relax_actors.engines.megatron.mcore.scorer import MegatronScorer  # noqa: E402

Arrays = list[Any]


def nothing() -> None:
    return None


def begun(engine: Any) -> Any:
    engine.initialise(5)
    engine.finish_warm_start()
    return engine


def published(engine: Any, path: Path) -> tuple[str, list[Path]]:
    return engine.publish(path), [path]


def furthest(one: Arrays, other: Arrays) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def generated(config: Config, trainer: Any, tmp_path: Path, *, experts: bool) -> tuple[Sequences, Arrays]:
    """What the rollout's engine generated with the trainer's weights, and its log-probs."""
    rollout = TransformersEngine(config.model_path, records_experts=experts)
    rollout.load(0, *published(trainer, tmp_path / "rollout.safetensors"))
    pairs = [(r, g) for r, group in zip(REQUESTS, rollout.generate(REQUESTS, nothing), strict=True) for g in group]
    recorded = [g.routed_experts for _, g in pairs if g.routed_experts is not None]
    sequences = Sequences([r.tokens for r, _ in pairs], [g.tokens for _, g in pairs], recorded or None)
    return sequences, [g.logprobs for _, g in pairs]


@pytest.mark.parametrize(
    ("architecture", "replays", "most"),
    [(DENSE, False, 1e-5), (LLAMA, False, 1e-5), (MOE, False, 5e-5), (MOE, True, 5e-5)],
    ids=["qwen3", "llama", "qwen3_moe", "qwen3_moe replayed"],
)
def test_all_engines_give_the_same_log_probs(
    tmp_path: Path, architecture: dict[str, Any], most: float, *, replays: bool
) -> None:
    config = config_of(tmp_path, architecture, trainer={"learning_rate": 1e-2, "router_replay": replays})
    megatron, beside = begun(MegatronEngine(config)), begun(TorchEngine(config))
    for step in range(3):  # away from the start, where all tokens are about as likely
        train(megatron, batch_of(step), step, nothing)
    moved = published(megatron, tmp_path / "moved.safetensors")
    sequences, by_rollout = generated(config, megatron, tmp_path, experts=replays)
    found = {}
    for name, scorer in (("torch", TorchScorer(config)), ("megatron", MegatronScorer(config))):
        scorer.load(1, *moved)
        found[name] = scorer.score(sequences, nothing)
        assert [s.shape for s in found[name]] == [c.shape for c in sequences.completions]
        assert furthest(found[name], by_rollout) < most
    assert furthest(found["torch"], found["megatron"]) < most
    advantages = np.linspace(-1, 1, len(sequences)).astype(np.float32)
    copy_into(beside._model, weights.load(moved[1]), "megatron")
    for trainer in (megatron, beside):
        measured = train(trainer, TrainBatch(sequences, by_rollout, advantages), 3, nothing).metrics
        assert abs(measured["max_ratio"] - 1) < most


def test_weights_are_staged_beside_those_in_use_and_swapped(tmp_path: Path) -> None:
    config = config_of(tmp_path, MOE)
    trainer = begun(MegatronEngine(config))
    scorer, sequences = MegatronScorer(config), batch_of(0).sequences
    with pytest.raises(StoreError, match="no verified weights"):
        scorer.score(sequences, nothing)
    scorer.load(0, *published(trainer, tmp_path / "0.safetensors"))
    first = scorer.score(sequences, nothing)
    train(trainer, batch_of(0), 0, nothing)
    copy = scorer.empty_copy()
    fingerprint, shards = published(trainer, tmp_path / "1.safetensors")
    copy.apply([WeightUpdate(1, fingerprint, shards)])
    scorer.stage(1, copy.tensors)
    assert furthest(first, scorer.score(sequences, nothing)) == 0
    assert (scorer.version, scorer.swap(), scorer.version) == (0, 1, 1)
    second = scorer.score(sequences, nothing)
    assert furthest(first, second) > 1e-3
    assert furthest(second, scorer.score(sequences, nothing)) == 0
    with pytest.raises(ConfigError, match="have no tensor"):
        scorer.stage(2, {name: tensor for name, tensor in copy.tensors.items() if "q_norm" not in name})


def test_recorded_experts_are_computed_with(tmp_path: Path) -> None:
    config = config_of(tmp_path, MOE, trainer={"router_replay": True})
    trainer, batch = begun(MegatronEngine(config)), routed(batch_of(0), 0)
    found = []
    for scorer in (TorchScorer(config), MegatronScorer(config)):
        scorer.load(0, *published(trainer, tmp_path / "0.safetensors"))
        found.append(scorer.score(batch.sequences, nothing))
        assert furthest(found[-1], scorer.score(batch_of(0).sequences, nothing)) > 1e-3
    assert furthest(*found) < 5e-5

"""Activation checkpointing: the same bits from less memory, with shared prefixes, media, experts and half precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from relax_actors.config import Config
from relax_actors.config.training import CriticSection
from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.protocols.samples import MicroBatchPlan
from relax_actors.engines.torch.critic import TorchCritic
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.forward import Forward
from relax_actors.engines.torch.model import build
from relax_actors.engines.torch.recompute import recompute_layers
from tests.conformance.base.critic_engine import policy_of, updated
from tests.support.batches import batch_of, routed, silent
from tests.support.media_batches import media_batch
from tests.support.tiny_megatron import DENSE, MOE, config_of, media_architecture

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "bfloat16": (DENSE, {"precision": "bfloat16"}),
    "frozen": (DENSE, {"freeze": ["model.embed_tokens.*", "model.layers.1.*"]}),
    "replayed_experts": (MOE, {"router_replay": True}),
    "media": (media_architecture("qwen3_vl"), {"max_tokens_per_microbatch": 120}),
}


def configured(folder: Path, name: str, recompute: str) -> Config:
    architecture, trainer = CASES[name]
    return config_of(folder, architecture, trainer={"backend": "torch", "recompute": recompute, **trainer})


def batches(name: str, config: Config) -> Sequence[Sequence[TrainSample]]:
    if name == "media":
        return [media_batch(config)] * 2
    drawn = [batch_of(step) for step in range(2)]
    return [routed(batch, 3, MOE) for batch in drawn] if name == "replayed_experts" else drawn


@pytest.mark.parametrize("name", CASES)
def test_recomputed_layers_give_the_same_metrics_and_weights(tmp_path: Path, name: str) -> None:
    results = []
    for recompute in ("none", "full"):
        config = configured(tmp_path / recompute, name, recompute)
        engine = TorchEngine(config)
        engine.initialise(5)
        engine.finish_warm_start()
        metrics = [dict(train(engine, batch, step, silent).metrics) for step, batch in enumerate(batches(name, config))]
        results.append((metrics, engine.fingerprint()))
    assert results[0] == results[1]
    assert (results[0][0][0].get("rerouted", 0.0) > 0.5) == (name == "replayed_experts")


def test_recomputed_layers_give_a_critic_the_same_weights(tmp_path: Path) -> None:
    fingerprints = set()
    for recompute in ("none", "full"):
        config = configured(tmp_path / recompute, "dense", recompute)
        critic = TorchCritic(config, CriticSection(learning_rate=1e-3))
        critic.initialise(policy_of(config, tmp_path))
        for step in range(2):
            updated(critic, step)
        fingerprints.add(critic.fingerprint())
    assert len(fingerprints) == 1


def bytes_kept(model: Any, samples: Sequence[TrainSample]) -> int:
    """Return the bytes that the forward pass of a micro-batch keeps for its backward pass, weights apart."""
    forward = Forward(torch.device("cpu"), torch.float32, 1.0)
    forward.prepare(model)
    batch = forward.micro_batch(samples, MicroBatchPlan.of(range(len(samples))))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward.logprobs(model, batch).sum()
    total = sum(kept.values())
    loss.backward()
    return total


def test_recomputed_layers_keep_their_inputs_only(tmp_path: Path) -> None:
    config = configured(tmp_path, "dense", "full")
    model, samples = build(config.model_path, seed=1), batch_of(0)
    whole = bytes_kept(model, samples)
    recompute_layers(model)
    assert bytes_kept(model, samples) < whole / 3

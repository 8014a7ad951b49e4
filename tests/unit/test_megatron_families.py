"""Megatron-Core computes each text family as transformers does, and takes the steps of the torch engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relax_actors.engines.protocols import train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.weights import files as weights
from tests.support.batches import batch_of, routed, silent
from tests.support.text_families import MEGATRON, experts_shape, logprobs_of, save_random
from tests.support.tiny_megatron import config_of, skip_if_missing
from tests.support.trained_engines import started

skip_if_missing()

from relax_actors.engines.megatron.mcore.engine import MegatronEngine  # noqa: E402 after the check
from relax_actors.engines.megatron.mcore.scorer import MegatronScorer  # noqa: E402


@pytest.mark.parametrize("name", MEGATRON)
def test_log_probs_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path, MEGATRON[name], trainer={"learning_rate": 1e-3})
    model, scorer, batch = save_random(config), MegatronScorer(config), batch_of(0)
    engine = started(MegatronEngine(config))
    scorer.load(0, engine.publish(shard := tmp_path / "published"), [shard])
    for sample, found in zip(batch, scorer.score(batch, silent), strict=True):
        expected = logprobs_of(model, sample.token_ids)[sample.loss_mask[1:]]
        np.testing.assert_allclose(found[sample.loss_mask], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MEGATRON)
def test_a_step_is_that_of_the_torch_engine_with_replayed_experts_too(tmp_path: Path, name: str) -> None:
    has_experts = "num_experts_per_tok" in MEGATRON[name]
    trainer = {"learning_rate": 1e-3, "router_replay": has_experts}
    config = config_of(tmp_path, MEGATRON[name], trainer=trainer)
    save_random(config)
    batch = routed(batch_of(1), 1, experts_shape(config)) if has_experts else batch_of(1)
    metrics, published = [], []
    for engine in (started(MegatronEngine(config)), started(TorchEngine(config))):
        metrics.append(train(engine, batch, 0, silent).metrics)
        engine.publish(path := tmp_path / type(engine).__name__)
        published.append(weights.load([path]))
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-4)
    assert published[0].keys() == published[1].keys()
    for weight, tensor in published[1].items():
        np.testing.assert_allclose(published[0][weight], tensor, rtol=0, atol=5e-5, err_msg=weight)

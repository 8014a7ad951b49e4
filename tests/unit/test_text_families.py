"""The engines score, train and generate with each text family as transformers computes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_actors.engines.protocols import TrainSample, train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.forward import Forward
from relax_actors.engines.torch.scorer import TorchScorer
from relax_actors.engines.transformers.engine import TransformersEngine
from tests.support.batches import batch_of, batch_of_generations, routed, silent
from tests.support.models import request_of
from tests.support.text_families import MEGATRON, TORCH, experts_shape, logprobs_of, save_random
from tests.support.tiny_megatron import config_of

# Models that differ from another one only in what megatron-core makes of them are left out.
MODELS = TORCH | {name: fields for name, fields in MEGATRON.items() if name not in ("llama tied", "qwen3_moe dense")}
REQUESTS = [request_of("12>", 1), request_of("4052>", 2), request_of("7>", 3)]


def assert_scores(samples: list[TrainSample], scored: list[Any], model: Any) -> None:
    """Compare log-probs of the trained tokens with those of transformers, one sequence after the other."""
    for sample, found in zip(samples, scored, strict=True):
        expected = logprobs_of(model, sample.token_ids)[sample.loss_mask[1:]]
        np.testing.assert_allclose(found[sample.loss_mask], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_engines_give_the_log_probs_of_transformers(tmp_path: Path, name: str) -> None:
    has_experts = "num_experts_per_tok" in MODELS[name]
    trainer = {"backend": "torch", "learning_rate": 1e-2, "router_replay": has_experts}
    config = config_of(tmp_path, MODELS[name], trainer=trainer)
    model, engine, scorer = save_random(config), TorchEngine(config), TorchScorer(config)
    engine.initialise(5)
    engine.finish_warm_start()
    published = engine.publish(shard := tmp_path / "published"), [shard]
    scorer.load(0, *published)
    batch = batch_of(0)
    assert_scores(batch, scorer.score(batch, silent), model)
    rollout = TransformersEngine(config.model_path, records_experts=has_experts)
    rollout.load(0, *published)
    groups = rollout.generate(REQUESTS, silent)
    pairs = [(request, sample) for request, group in zip(REQUESTS, groups, strict=True) for sample in group]
    made = batch_of_generations(pairs)
    assert_scores(made, [sample.logprobs for sample in made], model)
    if has_experts:
        made = [replace(s, routed_experts=g.routed_experts) for s, (_, g) in zip(made, pairs, strict=True)]
        forced = scorer.score(routed(batch, 1, experts_shape(config), missing=0.0), silent)
        own = scorer.score(batch, silent)
        assert max(float(np.abs(a - b).max()) for a, b in zip(forced, own, strict=True)) > 1e-2
    metrics = train(engine, made, 0, silent).metrics
    assert metrics["abs_delta"] < 1e-5
    assert metrics.get("rerouted", 0.0) == 0.0
    assert metrics["grad_norm"] > 0
    assert engine.publish(tmp_path / "trained") != published[0]


def test_recurrent_model_reads_each_sequence_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path, TORCH["qwen3_next"], trainer={"backend": "torch"})
    alone, samples, engine = save_random(config), batch_of(0), TorchEngine(config)
    engine.initialise(5)
    model, forward = engine.model, Forward(torch.device("cpu"), torch.float32, 1.0)
    forward.prepare(model)
    plans = forward.plan(samples, 10_000)
    assert sorted(plan.indices for plan in plans) == [[i] for i in range(len(samples))]
    for plan in plans:
        forward.logprobs(model, forward.micro_batch(samples, plan)).sum().backward()
    for sample in samples:
        ids = torch.as_tensor(sample.token_ids).long()[None]
        scores = alone(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        scores[torch.as_tensor(sample.loss_mask[1:])].sum().backward()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-4)

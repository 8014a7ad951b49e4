"""Router replay with the transformers and torch engines: chosen experts are recorded and replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from broker.errors import StoreError
from relax_actors.config import Config
from relax_actors.engines.protocols import Generation, train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.model import build
from relax_actors.engines.torch.scorer import TorchScorer
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.errors import ConfigError
from tests.support.batches import batch_of, batch_of_generations, routed, scored_by, silent
from tests.support.tiny_megatron import DENSE, MOE, config_of
from tests.unit.test_engines import REQUESTS, request

LAYERS, TOP_K = MOE["num_hidden_layers"], MOE["num_experts_per_tok"]
TORCH = {"backend": "torch", "learning_rate": 1e-3, "router_replay": True}


def started(config: Config, **settings: int) -> TorchEngine:
    engine = TorchEngine(config, **settings)
    engine.initialise(5)
    engine.finish_warm_start()
    return engine


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path, MOE, trainer=TORCH)


def served(trainer: TorchEngine, config: Config, tmp_path: Path, version: int = 0) -> TransformersEngine:
    engine = TransformersEngine(config.model_path, records_experts=True)
    shard = tmp_path / f"published.{version}.safetensors"
    engine.load(version, trainer.publish(shard), [shard])
    return engine


def pairs_of(engine: TransformersEngine, refresh: Any = None) -> list[tuple[Any, Generation]]:
    generated = engine.generate(REQUESTS, silent, refresh)
    return [(r, g) for r, group in zip(REQUESTS, generated, strict=True) for g in group]


def chosen_by(trainer: TorchEngine, config: Config, prompt: Any, completion: Any) -> Any:
    """Run a plain forward pass; return the experts of all tokens but the last, in ascending order for each token."""
    recorded: list[torch.Tensor] = []
    tokens = torch.from_numpy(np.concatenate([prompt, completion])).long()[None]
    model = build(config.model_path)
    model.load_state_dict(trainer.model.state_dict())
    with torch.no_grad(), Routers(model).recording(recorded):
        model(input_ids=tokens)
    return np.sort(torch.stack(recorded, 1).numpy(), -1)[:-1]


def test_recorded_experts_equal_those_of_a_pass_over_the_whole_sequence(tmp_path: Path, config: Config) -> None:
    trainer = started(config)
    lengths = set()
    for asked, sample in pairs_of(served(trainer, config, tmp_path)):
        assert sample.routed_experts is not None
        assert sample.routed_experts.shape == (len(asked.tokens) + len(sample.tokens) - 1, LAYERS, TOP_K)
        assert sample.routed_experts.dtype == np.int16
        wanted = chosen_by(trainer, config, asked.tokens, sample.tokens)
        np.testing.assert_array_equal(np.sort(sample.routed_experts, -1), wanted)
        lengths.add(len(sample.tokens))
    assert len(lengths) > 2  # samples left the batch at different times


@pytest.mark.slow
def test_in_flight_sample_records_the_experts_of_the_weights_that_sampled_each_token(
    tmp_path: Path, config: Config
) -> None:
    trainer = started(config)
    engine = served(trainer, config, tmp_path)
    old = {id(a.tokens): chosen_by(trainer, config, a.tokens, np.zeros(1, np.int32)) for a in REQUESTS}
    for step in range(30):
        train(trainer, batch_of(step), step, silent)
    shard = tmp_path / "newer.safetensors"
    fingerprint = trainer.publish(shard)
    calls = 0

    def refresh() -> bool:
        nonlocal calls
        calls += 1
        if calls == 2:
            engine.load(1, fingerprint, [shard])
        return calls == 2

    mixed = 0
    for asked, sample in pairs_of(engine, refresh):
        assert sample.routed_experts is not None
        prompt = len(asked.tokens)
        np.testing.assert_array_equal(np.sort(sample.routed_experts[:prompt], -1), old[id(asked.tokens)])
        if (sample.versions == 1).any():
            mixed += 1
            newer = chosen_by(trainer, config, asked.tokens, sample.tokens)
            # The experts before the first token of the new version come from the pass that sampled it.
            first = prompt - 1 + int(np.argmax(sample.versions == 1))
            np.testing.assert_array_equal(np.sort(sample.routed_experts, -1)[first:], newer[first:])
    assert mixed


def test_replaying_own_choices_changes_nothing(tmp_path: Path, config: Config) -> None:
    trainer, plain = started(config), started(config)
    pairs = pairs_of(served(trainer, config, tmp_path))
    batch = batch_of_generations(pairs)
    with_experts = [replace(s, routed_experts=g.routed_experts) for s, (_, g) in zip(batch, pairs, strict=True)]
    replayed, unreplayed = train(trainer, with_experts, 0, silent).metrics, train(plain, batch, 0, silent).metrics
    assert replayed["rerouted"] == replayed["unreplayed_rerouted"] == 0.0
    assert replayed["unreplayed_abs_delta"] < 1e-5
    assert replayed["abs_delta"] < 1e-5
    assert replayed["loss"] == pytest.approx(unreplayed["loss"], abs=1e-6)
    scorer = TorchScorer(config)
    shard = tmp_path / "scored.safetensors"
    scorer.load(1, trainer.publish(shard), [shard])
    own = scorer.score(batch, silent)
    forced = routed(batch, 1, MOE, missing=0.0)
    other = scorer.score(forced, silent)
    assert max(float(np.abs(a - b).max()) for a, b in zip(own, other, strict=True)) > 1e-3


def test_replay_removes_the_mismatch_of_different_routing(tmp_path: Path, config: Config) -> None:
    """Random experts stand for a rollout whose rounding led to other choices than the trainer's."""
    trainer = started(config)
    batch = routed(batch_of(0), 0, MOE, missing=0.0)
    scorer = TorchScorer(config)
    shard = tmp_path / "scored.safetensors"
    scorer.load(0, trainer.publish(shard), [shard])
    batch = scored_by(batch, scorer.score(batch, silent))
    measured = train(trainer, batch, 0, silent).metrics
    assert measured["abs_delta"] < 1e-6
    assert measured["unreplayed_abs_delta"] > 1e-3
    assert measured["unreplayed_k3"] > measured["k3"]
    assert measured["rerouted"] > 0.5
    assert measured["unreplayed_rerouted"] > 0.5
    # The comparison without replay is made at intervals and does not change the weights.
    later = train(trainer, batch, 1, silent).metrics
    assert "unreplayed_abs_delta" not in later
    other = started(config, replay_comparison_interval=0)
    assert "unreplayed_abs_delta" not in train(other, batch, 0, silent).metrics
    train(other, batch, 1, silent)
    assert other.fingerprint() == trainer.fingerprint()


def test_engine_records_no_experts_by_default(tmp_path: Path, config: Config) -> None:
    trainer = started(config)
    engine = TransformersEngine(config.model_path)
    with pytest.raises(StoreError):
        engine.generate([request("1>", 1)], silent)
    shard = tmp_path / "published.safetensors"
    engine.load(0, trainer.publish(shard), [shard])
    assert engine.generate([request("1>", 1)], silent)[0][0].routed_experts is None


def test_model_without_supported_routers_is_refused(tmp_path: Path) -> None:
    dense = config_of(tmp_path, DENSE)
    with pytest.raises(ConfigError, match=r"trainer\.router_replay: .*no router in the model qwen3; leave"):
        TransformersEngine(dense.model_path, records_experts=True)


def test_sequences_without_recorded_experts_keep_their_own_in_a_mixed_micro_batch(
    tmp_path: Path, config: Config
) -> None:
    scorer, batch = TorchScorer(config), batch_of(0)
    shard = tmp_path / "scored.safetensors"
    scorer.load(0, started(config).publish(shard), [shard])
    forced = routed(batch, 1, MOE, missing=0.0)
    mixed = [b if i % 2 else a for i, (a, b) in enumerate(zip(batch, forced, strict=True))]
    alone = [scorer.score([sample], silent)[0] for sample in mixed]
    for together, expected in zip(scorer.score(mixed, silent), alone, strict=True):
        np.testing.assert_allclose(together, expected, atol=1e-5)

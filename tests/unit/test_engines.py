"""Behaviour of the transformers and torch engines that their protocols do not require; see tests/conformance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from broker.errors import StoreError
from relax_actors.config import Config
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import Generation, GenerationRequest, train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import tensors_of
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.errors import ConfigError, RowError
from relax_actors.weights import files as weights
from tests.support import models
from tests.support.batches import batch_of_groups
from tests.support.models import QWEN3
from tests.support.models import request_of as request

batch_of = batch_of_groups
REQUESTS = [request("12>", 1), request("9081>", 2), request("5>", 3, temperature=1.0)]


def config_of(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    trainer = {"learning_rate": 1e-2, "max_tokens_per_microbatch": 80, **sections.pop("trainer", {})}
    return models.config_of(tmp_path / "run", QWEN3, trainer=trainer, **sections)


def served(trainer: TorchEngine, config: Config, tmp_path: Path) -> TransformersEngine:
    """Build an inference engine with the weights of a trainer as version 3."""
    engine = TransformersEngine(config.model_path)
    shard = tmp_path / "published.safetensors"
    engine.load(3, trainer.publish(shard), [shard])
    return engine


def generate(engine: TransformersEngine, requests: list[GenerationRequest]) -> list[list[Generation]]:
    return engine.generate(requests, lambda: None)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path)


@pytest.fixture
def trainer(config: Config) -> TorchEngine:
    trainer = TorchEngine(config)
    trainer.initialise(5)
    trainer.finish_warm_start()
    return trainer


@pytest.fixture
def engine(trainer: TorchEngine, config: Config, tmp_path: Path) -> TransformersEngine:
    return served(trainer, config, tmp_path)


def test_generation_and_training_agree_on_the_logprobs(trainer: TorchEngine, engine: TransformersEngine) -> None:
    measured = train(trainer, batch_of(generate(engine, REQUESTS), REQUESTS), 0, lambda: None).metrics
    assert measured["abs_delta"] < 1e-5
    assert measured["max_ratio"] < 1 + 1e-4
    assert measured["micro_batches"] > 1


def test_row_is_returned_in_the_forward_pass_in_which_it_ends(engine: TransformersEngine) -> None:
    asked = [request("12>", seed, samples=1) for seed in range(12)]
    lengths = [len(samples[0].tokens) for samples in generate(engine, asked)]
    assert len(set(lengths)) > 3
    passes, returned = 0, []

    def progress() -> None:
        nonlocal passes
        passes += 1

    for done in engine.stream(asked, progress):
        returned += [(passes, i, len(samples[0].tokens)) for i, samples in done]
    assert returned == sorted((length, i, length) for i, length in enumerate(lengths))


def test_staged_weights_are_used_after_the_swap_only(
    trainer: TorchEngine, engine: TransformersEngine, tmp_path: Path
) -> None:
    before = generate(engine, REQUESTS)
    train(trainer, batch_of(before, REQUESTS), 0, lambda: None)
    assert trainer.publish(tmp_path / "next") == trainer.fingerprint()
    engine.stage(4, weights.load([tmp_path / "next"]))
    assert engine.version == 3
    for one, other in zip(before, generate(engine, REQUESTS), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert engine.swap() == engine.version == 4
    assert weights.fingerprint(tensors_of(engine.model)) == trainer.fingerprint()
    assert before[0][0].logprobs.tolist() != generate(engine, REQUESTS)[0][0].logprobs.tolist()


def test_weights_that_are_no_full_set_are_refused_before_and_after_a_good_one(config: Config) -> None:
    engine = TransformersEngine(config.model_path)
    tensors = {name: tensor.clone() for name, tensor in tensors_of(engine.model).items()}
    name = next(iter(tensors))
    partial = {other: tensor for other, tensor in tensors.items() if other != name}
    wide = tensors | {name: torch.zeros(2, 2)}
    for good in (False, True):
        if good:
            engine.stage(0, tensors)
            engine.swap()
        for bad, why in (({}, "missing"), (partial, name), (wide, "shape")):
            with pytest.raises(ConfigError, match=why):
                engine.stage(1, bad)


def test_third_version_reuses_the_memory_of_the_first(config: Config) -> None:
    engine = TransformersEngine(config.model_path)
    tensors = {name: torch.full_like(tensor, 0.5) for name, tensor in tensors_of(engine.model).items()}
    places = []
    for version in range(4):
        engine.stage(version, tensors)
        engine.swap()
        places.append({tensor.data_ptr() for tensor in tensors_of(engine.model).values()})
    assert places[0] == places[2] != places[1] == places[3]
    head, embedding = (engine.model.get_parameter(n) for n in ("lm_head.weight", "model.embed_tokens.weight"))
    assert head.data_ptr() == embedding.data_ptr()  # still tied


def test_background_checkpoint_equals_a_direct_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, algorithm={"kl": {"place": "loss", "coefficient": 0.1}})
    one = TorchEngine(config)
    one.initialise(5)
    one.finish_warm_start()
    batch = batch_of(generate(served(one, config, tmp_path), REQUESTS), REQUESTS)
    train(one, batch, 0, lambda: None)
    direct, background = tmp_path / "direct", tmp_path / "background"
    for folder in (direct, background):
        folder.mkdir()
    one.save(direct)
    finish = one.begin_save(background)
    train(one, batch, 1, lambda: None)
    finish()
    for path in direct.iterdir():
        assert (background / path.name).read_bytes() == path.read_bytes(), path.name
    broken = one.begin_save(tmp_path / "nowhere")
    with pytest.raises(OSError, match="nowhere"):
        broken()


def test_weights_are_published_in_half_precision_and_saved_in_float32(tmp_path: Path) -> None:
    trainer = TorchEngine(config_of(tmp_path, trainer={"precision": "bfloat16"}))
    trainer.initialise(5)
    published, checkpoint = tmp_path / "half.safetensors", tmp_path / "checkpoint"
    checkpoint.mkdir()
    trainer.publish(published)
    trainer.save(checkpoint)
    assert {tensor.dtype for tensor in weights.load([published]).values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in weights.load([checkpoint / "model.safetensors"]).values()} == {torch.float32}


def test_weights_of_another_model_are_refused_with_their_names(config: Config, tmp_path: Path) -> None:
    engine = TransformersEngine(config.model_path)
    tensors = {**tensors_of(engine.model), "stranger": torch.zeros(1)}
    shard = tmp_path / "bad.safetensors"
    weights.save(tensors, shard)
    with pytest.raises(ConfigError, match="unknown \\['stranger'\\]"):
        engine.load(1, weights.fingerprint(tensors), [shard])
    with pytest.raises(StoreError, match="no verified weights"):
        generate(engine, REQUESTS)


def test_tokenizer_refuses_text_outside_its_alphabet(config: Config) -> None:
    tokenizer = Tokenizer(config.model_path)
    assert tokenizer.decode(tokenizer.encode("12>#")) == "12>"
    with pytest.raises(RowError, match=r"is not in the model.s alphabet"):
        tokenizer.encode("a")

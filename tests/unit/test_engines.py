"""The engines on tiny real models: one set of numbers, whoever computes them, and exact resumption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from broker.errors import StoreError
from relax_actors.config import Config, validate
from relax_actors.data.model_folder import prepare
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import Generation, GenerationRequest, TrainSample, train
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.torch.model import copy_into, tensors_of
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.errors import ConfigError
from relax_actors.weights import files as weights
from tests.support.batches import answers, batch_of_generations

ALPHABET = "0123456789>#"
STOP = ALPHABET.index("#")
ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def config_of(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "engines", "folder": str(tmp_path / "run"), "seed": 5},
        "model": {"architecture": ARCHITECTURE, "tokenizer": {"alphabet": ALPHABET}},
        "data": {"kind": "python", "function": "nothing"},
        "trainer": {"learning_rate": 1e-2, "max_tokens_per_microbatch": 100},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    config = validate(tree, "test")
    prepare(config, config.model_path)
    return config


def request(text: str, seed: int, **fields: Any) -> GenerationRequest:
    tokens = np.array([ALPHABET.index(c) for c in text], np.int32)
    settings = {"samples": 4, "temperature": 1.0, "top_p": 1.0, "max_tokens": 9, "stop_ids": frozenset([STOP])}
    return GenerationRequest(tokens, seed, **(settings | fields))


@pytest.fixture
def engines(tmp_path: Path) -> tuple[TorchEngine, TransformersEngine]:
    config = config_of(tmp_path)
    trainer = TorchEngine(config)
    trainer.initialise(5)
    return trainer, served(trainer, config, tmp_path)


def served(trainer: TorchEngine, config: Config, tmp_path: Path) -> TransformersEngine:
    engine = TransformersEngine(config.model_path)
    shard = tmp_path / "published.safetensors"
    engine.load(3, trainer.publish(shard), [shard])
    return engine


def batch_of(generated: list[list[Generation]], requests: list[GenerationRequest]) -> list[TrainSample]:
    pairs = [(r, g) for r, samples in zip(requests, generated, strict=True) for g in samples]
    rows = [i for i, samples in enumerate(generated) for _ in samples]
    return [replace(s, row=i) for s, i in zip(batch_of_generations(pairs), rows, strict=True)]


def generate(engine: TransformersEngine, requests: list[GenerationRequest]) -> list[list[Generation]]:
    return engine.generate(requests, lambda: None)


REQUESTS = [request("12>", 1), request("9081>", 2), request("5>", 3, temperature=1.0)]


def test_generation_and_training_agree_on_the_log_probs(
    engines: tuple[TorchEngine, TransformersEngine],
) -> None:
    trainer, engine = engines
    measured = train(trainer, batch_of(generate(engine, REQUESTS), REQUESTS), 0, lambda: None).metrics
    assert measured["abs_delta"] < 1e-5
    assert measured["max_ratio"] < 1 + 1e-4
    assert measured["micro_batches"] > 1


def test_a_rows_samples_depend_on_its_seed_and_not_on_its_neighbours(
    engines: tuple[TorchEngine, TransformersEngine],
) -> None:
    _, engine = engines
    together = generate(engine, REQUESTS)
    for i, alone in enumerate(REQUESTS):
        for a, b in zip(together[i], generate(engine, [alone])[0], strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    other = generate(engine, [request("12>", 99)])[0]
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(together[0], other, strict=True))


def test_a_row_is_given_out_as_soon_as_its_samples_have_ended(
    engines: tuple[TorchEngine, TransformersEngine],
) -> None:
    _, engine = engines
    asked = [request("12>", seed, samples=1) for seed in range(12)]
    lengths = [len(samples[0].tokens) for samples in generate(engine, asked)]
    assert len(set(lengths)) > 3
    passes, given = 0, []

    def progress() -> None:
        nonlocal passes
        passes += 1

    for done in engine.stream(asked, progress):
        given += [(passes, i, len(samples[0].tokens)) for i, samples in done]
    assert given == sorted((length, i, length) for i, length in enumerate(lengths))


def test_sampled_tokens_follow_the_models_distribution(engines: tuple[TorchEngine, TransformersEngine]) -> None:
    _, engine = engines
    samples = generate(engine, [request("12>", 7, samples=4000, max_tokens=1)])[0]
    counts = np.bincount([int(s.tokens[0]) for s in samples], minlength=13) / 4000
    expected = np.zeros(13)
    for s in samples:
        expected[int(s.tokens[0])] = np.exp(s.logprobs[0])
    np.testing.assert_allclose(counts, expected, atol=0.04)
    assert abs(expected.sum() - 1) < 0.02


def test_top_p_keeps_to_the_likeliest_tokens(engines: tuple[TorchEngine, TransformersEngine]) -> None:
    _, engine = engines
    whole = generate(engine, [request("12>", 7, samples=500, max_tokens=1)])[0]
    narrow = generate(engine, [request("12>", 7, samples=500, max_tokens=1, top_p=0.3)])[0]
    probability = {int(s.tokens[0]): float(np.exp(s.logprobs[0])) for s in whole}
    ranked = sorted(probability, key=lambda t: -probability[t])
    allowed: set[int] = set()
    for token in ranked:
        if sum(probability[t] for t in allowed) >= 0.3:
            break
        allowed.add(token)
    assert {int(s.tokens[0]) for s in narrow} == allowed


def test_stop_tokens_end_a_sample_but_not_before_min_tokens(
    engines: tuple[TorchEngine, TransformersEngine],
) -> None:
    _, engine = engines
    every = frozenset(range(12))
    (one,) = generate(engine, [request("1>", 1, samples=1, stop_ids=every)])[0]
    assert (len(one.tokens), one.finish_reason) == (1, "stop")
    late = generate(engine, [request("1>", 1, samples=64, min_tokens=5)])[0]
    assert min(len(s.tokens) for s in late) >= 5
    assert all(STOP not in s.tokens[:4] for s in late)


def test_greedy_is_the_likeliest_token(engines: tuple[TorchEngine, TransformersEngine]) -> None:
    _, engine = engines
    (a,) = generate(engine, [request("77>", 1, samples=1, greedy=True)])[0]
    (b,) = generate(engine, [request("77>", 2, samples=1, greedy=True)])[0]
    np.testing.assert_array_equal(a.tokens, b.tokens)


def test_an_engine_without_verified_weights_serves_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    trainer = TorchEngine(config)
    engine = TransformersEngine(config.model_path)
    with pytest.raises(StoreError, match="no verified weights"):
        generate(engine, REQUESTS)
    shard = tmp_path / "w.safetensors"
    published = trainer.publish(shard)
    engine.load(1, published, [shard])
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(StoreError, match="fingerprint"):
        engine.load(2, published, [shard])
    with pytest.raises(StoreError, match="no verified weights"):
        generate(engine, REQUESTS)


def test_staged_weights_are_served_from_the_swap_on(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    trainer = TorchEngine(config)
    trainer.initialise(5)
    engine = served(trainer, config, tmp_path)
    before = generate(engine, REQUESTS)
    train(trainer, batch_of(before, REQUESTS), 0, lambda: None)
    tensors = {name: tensor.detach().clone() for name, tensor in tensors_of(trainer._model).items()}
    engine.stage(4, tensors)
    for tensor in tensors.values():
        tensor.zero_()  # the caller's again
    assert engine.version == 3
    same = generate(engine, REQUESTS)
    assert all(
        np.array_equal(a.logprobs, b.logprobs)
        for x, y in zip(before, same, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert engine.swap() == engine.version == 4
    assert weights.fingerprint(tensors_of(engine._model).items()) == trainer.fingerprint()
    after = generate(engine, REQUESTS)
    assert int(after[0][0].versions[0]) == 4
    assert before[0][0].logprobs.tolist() != after[0][0].logprobs.tolist()
    with pytest.raises(StoreError, match="nothing can be swapped"):
        engine.swap()


def test_a_third_set_takes_the_memory_of_the_first(tmp_path: Path) -> None:
    engine = TransformersEngine(config_of(tmp_path).model_path)
    tensors = {name: torch.full_like(tensor, 0.5) for name, tensor in tensors_of(engine._model).items()}
    places = []
    for version in range(4):
        engine.stage(version, tensors)
        engine.swap()
        places.append({tensor.data_ptr() for tensor in tensors_of(engine._model).values()})
    assert places[0] == places[2] != places[1] == places[3]
    head, embedding = (engine._model.get_parameter(n) for n in ("lm_head.weight", "model.embed_tokens.weight"))
    assert head.data_ptr() == embedding.data_ptr()  # tied as before


def test_training_publishes_a_delta_of_small_steps_in_half_precision_only(tmp_path: Path) -> None:
    for dtype, deltas in (("bfloat16", True), ("float32", False)):
        config = config_of(tmp_path, trainer={"precision": dtype, "learning_rate": 1e-6})
        trainer = TorchEngine(config)
        trainer.initialise(5)
        engine = served(trainer, config, tmp_path)
        assert trainer.delta() is None
        trainer.remember()
        train(trainer, batch_of(generate(engine, REQUESTS), REQUESTS), 0, lambda: None)
        write = trainer.delta()
        assert (write is not None) == deltas
        if write is not None:
            assert write(tmp_path / "delta") == trainer.fingerprint() == trainer.publish(tmp_path / "whole")
            assert (tmp_path / "delta").stat().st_size < 0.5 * (tmp_path / "whole").stat().st_size


@pytest.mark.parametrize("algorithm", [{}, {"kl_coefficient": 0.1, "loss": "sequence"}])
def test_training_goes_on_from_a_checkpoint_exactly(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    config = config_of(tmp_path, algorithm=algorithm)
    one = TorchEngine(config)
    one.initialise(5)
    one.finish_warm_start()
    engine = served(one, config, tmp_path)
    batch = batch_of(generate(engine, REQUESTS), REQUESTS)
    train(one, batch, 0, lambda: None)
    train(one, batch, 1, lambda: None)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    one.save(folder)
    other = TorchEngine(config)
    other.load(folder)
    assert other.fingerprint() == one.fingerprint()
    for step in (2, 3):
        a, b = train(one, batch, step, lambda: None), train(other, batch, step, lambda: None)
        assert a.metrics == b.metrics
    assert other.fingerprint() == one.fingerprint()


def test_a_checkpoint_that_is_written_meanwhile_is_of_the_moment_at_which_it_was_begun(tmp_path: Path) -> None:
    config = config_of(tmp_path, algorithm={"kl_coefficient": 0.1})
    one = TorchEngine(config)
    one.initialise(5)
    one.finish_warm_start()
    batch = batch_of(generate(served(one, config, tmp_path), REQUESTS), REQUESTS)
    train(one, batch, 0, lambda: None)
    folders = [tmp_path / name for name in ("waited for", "meanwhile")]
    for folder in folders:
        folder.mkdir()
    one.save(folders[0])
    finish = one.begin_save(folders[1])
    train(one, batch, 1, lambda: None)
    finish()
    for path in folders[0].iterdir():
        assert (folders[1] / path.name).read_bytes() == path.read_bytes(), path.name
    broken = one.begin_save(tmp_path / "nowhere")
    with pytest.raises(OSError, match="nowhere"):
        broken()


def test_micro_batches_change_nothing_but_rounding(tmp_path: Path) -> None:
    results = []
    for budget in (30, 10_000):
        config = config_of(tmp_path, trainer={"max_tokens_per_microbatch": budget, "learning_rate": 1e-3})
        trainer = TorchEngine(config)
        trainer.initialise(5)
        engine = served(trainer, config, tmp_path)
        measured = train(trainer, batch_of(generate(engine, REQUESTS), REQUESTS), 0, lambda: None).metrics
        results.append((measured["loss"], measured["gradient_norm"]))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4)


def test_bfloat16_publishes_bfloat16_and_keeps_float32_inside(tmp_path: Path) -> None:
    config = config_of(tmp_path, trainer={"precision": "bfloat16"})
    trainer = TorchEngine(config)
    trainer.initialise(5)
    engine = served(trainer, config, tmp_path)
    train(trainer, batch_of(generate(engine, REQUESTS), REQUESTS), 0, lambda: None)
    shard = tmp_path / "half.safetensors"
    trainer.publish(shard)
    assert {t.dtype for t in weights.load([shard]).values()} == {torch.bfloat16}
    assert {t.dtype for t in tensors_of(trainer._model).values()} == {torch.float32}


def test_warm_start_learns_the_answers(tmp_path: Path) -> None:
    trainer = TorchEngine(config_of(tmp_path))
    trainer.initialise(5)
    prompts = [r.tokens for r in REQUESTS]
    sequences = answers(prompts, [1, 2, STOP])
    losses = [trainer.warm_start(sequences, 1e-2, lambda: None).metrics["loss"] for _ in range(30)]
    assert losses[-1] < losses[0] / 3


def test_the_exported_folder_holds_the_weights_that_were_published(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = TorchEngine(config_of(tmp_path))
    trainer.initialise(5)
    trainer.export(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert weights.fingerprint(tensors_of(loaded).items()) == trainer.fingerprint()


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    trainer = TorchEngine(config)
    tensors = dict(tensors_of(trainer._model))
    tensors["stranger"] = torch.zeros(1)
    shard = tmp_path / "bad.safetensors"
    weights.save(tensors, shard)
    engine = TransformersEngine(config.model_path)
    with pytest.raises(ConfigError, match="unknown \\['stranger'\\]"):
        engine.load(1, weights.fingerprint(tensors.items()), [shard])


def test_the_tokenizer_refuses_what_it_has_no_token_for(tmp_path: Path) -> None:
    from relax_actors.errors import RowError

    tokenizer = Tokenizer(config_of(tmp_path).model_path)
    assert tokenizer.decode(tokenizer.encode("12>#")) == "12>"
    with pytest.raises(RowError, match="cannot be tokenized"):
        tokenizer.encode("a")


def test_running_samples_go_on_with_newer_weights(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    trainer = TorchEngine(config)
    trainer.initialise(5)
    engine = served(trainer, config, tmp_path)
    together = [replace(r, samples=16, temperature=1.0) for r in REQUESTS]
    undisturbed = generate(engine, together)
    newer = {name: 3 * tensor.detach() for name, tensor in tensors_of(trainer._model).items()}
    calls = 0

    def refresh() -> bool:
        nonlocal calls
        calls += 1
        if calls != 2:
            return False
        engine.stage(4, newer)
        return engine.swap() == 4

    updated = engine.generate(together, lambda: None, refresh)
    spans = 0
    for request, group, before in zip(together, updated, undisturbed, strict=True):
        for sample, other in zip(group, before, strict=True):
            assert sample.versions.tolist() == [3] * min(2, len(sample.tokens)) + [4] * (len(sample.tokens) - 2)
            np.testing.assert_array_equal(sample.tokens[:2], other.tokens[:2])
            spans += len(sample.tokens) > 2
            # Each token's log-prob is that of its version after all tokens before it, whoever wrote those.
            with torch.no_grad():
                tokens = torch.tensor([[*request.tokens.tolist(), *sample.tokens.tolist()]])
                for version, tensors in ((3, tensors_of(trainer._model)), (4, newer)):
                    copy_into(engine._model, tensors, "test")
                    logits = engine._model(tokens).logits[0, len(request.tokens) - 1 : -1]
                    expected = logits.log_softmax(-1).gather(1, tokens[0, len(request.tokens) :, None].long())[:, 0]
                    wrote = sample.versions == version
                    np.testing.assert_allclose(sample.logprobs[wrote], expected.numpy()[wrote], atol=1e-5)
    assert spans > 8

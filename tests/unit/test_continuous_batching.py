"""Requests that join a running batch of the transformers engine, and caches that it keeps between turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.engines.torch.engine import TorchEngine
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.messages import FinishReason
from tests.support.models import QWEN3, VOCABULARY, ReferenceModel, config_of, publish, random_weights
from tests.support.models import request_of as request

BYTES = 1 << 20


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[TransformersEngine, TransformersEngine]:
    """An engine that nothing joins, and one that keeps caches, with the same weights."""
    path = tmp_path_factory.mktemp("engines")
    config = config_of(path / "run", QWEN3, trainer={"max_tokens_per_microbatch": 100})
    trainer = TorchEngine(config)
    trainer.initialise(5)
    trainer.finish_warm_start()
    shard = path / "published.safetensors"
    fingerprint = trainer.publish(shard)
    alone, joined = TransformersEngine(config.model_path), TransformersEngine(config.model_path, kept_bytes=BYTES)
    for engine in (alone, joined):
        engine.load(3, fingerprint, [shard])
    return alone, joined


def same(one: Generation, other: Generation) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.finish_reason == other.finish_reason
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-6)


def test_joined_requests_get_the_samples_that_they_get_alone(
    engines: tuple[TransformersEngine, TransformersEngine],
) -> None:
    alone, joined = engines
    first = [request("12>", 1, samples=2), request("9081>", 2, samples=2)]
    later = [request("5>", 7, samples=3), request("777>", 8, samples=1), request("3142>", 9, samples=1)]
    waiting = [[], later[:2], [], later[2:]]

    def more(limit: int) -> list[GenerationRequest]:
        assert limit == 0
        return waiting.pop(0) if waiting else []

    found = dict(pair for done in joined.stream(first, lambda: None, None, more) for pair in done)
    for i, asked in enumerate([*first, *later]):
        for one, other in zip(found[i], alone.generate([asked], lambda: None)[0], strict=True):
            same(one, other)


NUMBER = 'start: number\nnumber: %json {"type": "integer", "minimum": 100, "maximum": 999999}'


def test_sample_without_a_grammar_has_the_same_bits_beside_one_with_a_grammar(
    engines: tuple[TransformersEngine, TransformersEngine],
) -> None:
    alone, _ = engines
    free = [request("12>", 1, samples=4, min_tokens=2), request("9081>", 2, samples=4, top_p=0.9)]
    beside = request("5>", 3, samples=4)
    before = alone.generate([*free, beside], lambda: None)
    after = alone.generate([*free, replace(beside, grammar=NUMBER)], lambda: None)
    for one, other in zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.finish_reason == other.finish_reason
        assert one.logprobs[:3].tobytes() == other.logprobs[:3].tobytes()
    assert [s.tokens.tolist() for s in before[2]] != [s.tokens.tolist() for s in after[2]]


def test_requests_with_grammars_join_a_batch(engines: tuple[TransformersEngine, TransformersEngine]) -> None:
    alone, joined = engines
    first = [request("12>", 1, samples=2), request("9081>", 2, samples=2, grammar=NUMBER)]
    later = [request("5>", 7, samples=3, grammar=NUMBER), request("777>", 8, samples=1)]
    later.append(request("3142>", 9, samples=1, grammar="start: /[0-9]x/"))
    waiting = [[], later[:2], [], later[2:]]

    def more(limit: int) -> list[GenerationRequest]:
        assert limit == 0
        return waiting.pop(0) if waiting else []

    found = dict(pair for done in joined.stream(first, lambda: None, None, more) for pair in done)
    for i, asked in enumerate([*first, *later]):
        for one, other in zip(found[i], alone.generate([asked], lambda: None)[0], strict=True):
            same(one, other)
    assert found[4][0].finish_reason is FinishReason.ERROR


def test_kept_cache_gives_the_turn_of_a_fresh_prefill(engines: tuple[TransformersEngine, TransformersEngine]) -> None:
    alone, joined = engines
    asked = [replace(request(f"{n}>", n, samples=1), session=f"s{n}") for n in (1, 22, 333)]
    turns = joined.generate(asked, lambda: None)
    hits = joined.kept.hits
    following = [
        replace(a, tokens=np.concatenate([a.tokens, turn[0].tokens, np.array([4, 5], np.int32)]), seed=90 + i)
        for i, (a, turn) in enumerate(zip(asked, turns, strict=True))
    ]
    # One of the conversations was rewritten, and gets no cache.
    following[1] = replace(following[1], tokens=following[1].tokens[::-1].copy())
    found = joined.generate(following, lambda: None)
    assert joined.kept.hits == hits + 2
    for i, asked_again in enumerate(following):
        same(found[i][0], alone.generate([asked_again], lambda: None)[0][0])


def test_kept_caches_stay_within_their_bound(engines: tuple[TransformersEngine, TransformersEngine]) -> None:
    _, joined = engines
    joined.kept.clear()
    joined.generate([replace(request("12>", 1, samples=1), session="first")], lambda: None)
    assert len(joined.kept) == 1
    size = joined.kept.nbytes
    joined.generate(
        [replace(request("1>", n, samples=1), session=f"n{n}") for n in range(2 * BYTES // size)], lambda: None
    )
    assert 0 < len(joined.kept) <= BYTES // size * 2
    assert joined.kept.take("first", np.zeros(99, np.int32), 3) is None


def test_entropies_are_those_of_the_whole_vocabulary_and_change_no_sample(
    engines: tuple[TransformersEngine, TransformersEngine], tmp_path: Path
) -> None:
    config = config_of(tmp_path / "run", QWEN3)
    weights = random_weights(config)
    recording = TransformersEngine(config.model_path, records_entropies=True, kept_bytes=BYTES)
    plain = TransformersEngine(config.model_path, kept_bytes=BYTES)
    for engine in (recording, plain):
        engine.load(0, *publish(weights, tmp_path / "weights.safetensors"))
    first = [request("12>", 1, temperature=0.7), request("9081>", 2, top_p=0.5, min_tokens=3)]
    later = [request("5>", 3, samples=1, greedy_samples=1), request("3>", 4, samples=1, max_tokens=15)]

    def generated(engine: TransformersEngine) -> list[list[Generation]]:
        waiting = [[], later]
        more = lambda _: waiting.pop(0) if waiting else []  # noqa: E731
        done = dict(pair for pairs in engine.stream(first, lambda: None, None, more) for pair in pairs)
        return [done[i] for i in range(len(done))]

    reference = ReferenceModel(config, weights)
    for asked, with_entropies, without in zip([*first, *later], generated(recording), generated(plain), strict=True):
        for one, other in zip(with_entropies, without, strict=True):
            assert (one.tokens.tolist(), one.logprobs.tolist()) == (other.tokens.tolist(), other.logprobs.tolist())
            assert (other.entropies, one.entropies is None) == (None, False)
            logits = reference.logits([*asked.tokens.tolist(), *one.tokens.tolist()])[len(asked.tokens) - 1 : -1]
            expected = torch.distributions.Categorical(logits=logits / asked.temperature).entropy()
            np.testing.assert_allclose(one.entropies, expected.numpy(), atol=1e-5 * np.log(VOCABULARY))

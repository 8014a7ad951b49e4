"""Turns of episodes on a real SGLang server: prefix cache, weight updates between turns, full contexts, same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relax_actors.engines.protocols import Generation, GenerationRequest
from relax_actors.engines.sglang.engine import SglangEngine
from tests.conformance.base.inference_engine import pairs_of
from tests.support.batches import silent
from tests.support.models import check_logprobs, publish, random_weights, request_of
from tests.support.sglang_servers import DENSE, Kept, config_of, engine_of, skip_if_missing

skip_if_missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OBSERVATION = np.array([3, 1, 10], np.int32)
CONTEXT, EPISODES, TURN = 512, 6, 12


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    config = config_of(tmp_path_factory.mktemp("run"), DENSE, run={"deterministic": False})
    yield (server := Kept(config))
    server.close()


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    yield (server := Kept(config_of(tmp_path_factory.mktemp("run"), DENSE, run={"deterministic": True})))
    server.close()


def first_turns() -> list[GenerationRequest]:
    """Turns of episodes with prompts of 40 tokens that have nothing in common."""
    asked = request_of("1>", 1, samples=1, max_tokens=TURN, stop_ids=frozenset())
    prompts = np.random.default_rng(0).integers(0, 10, (EPISODES, 40)).astype(np.int32)
    return [replace(asked, tokens=tokens, seed=i, session=f"s{i}") for i, tokens in enumerate(prompts)]


def next_turns(requests: list[GenerationRequest], groups: list[list[Generation]]) -> list[GenerationRequest]:
    """The same conversations, each with its answer and an observation."""
    return [
        replace(request, tokens=np.concatenate([request.tokens, made.tokens, OBSERVATION]), seed=request.seed + 100)
        for request, (made,) in zip(requests, groups, strict=True)
    ]


def load(kept: Kept, engine: SglangEngine, tmp_path: Path) -> None:
    engine.load(3, *publish(random_weights(kept.config), tmp_path / "weights.safetensors"))


def test_turns_read_only_what_is_new_until_weights_change(kept: Kept, tmp_path: Path) -> None:
    with engine_of(kept) as engine:
        load(kept, engine, tmp_path)
        turn, made, cached = first_turns(), [], []
        for number in range(4):
            if number == 3:
                engine.stage(4, random_weights(kept.config, 0.7))
                engine.swap()
            before = engine.metrics()
            groups = engine.generate(turn, silent)
            made.append(pairs_of(turn, groups))
            after = engine.metrics()
            assert after["prompt_tokens"] - before["prompt_tokens"] == sum(len(one.tokens) for one in turn)
            cached.append(after["cached_prompt_tokens"] - before["cached_prompt_tokens"])
            turn = next_turns(turn, groups)
        # The newest token of a turn has not passed through the model when the turn ends.
        assert cached[1:3] == [EPISODES * (40 + TURN - 1), EPISODES * (40 + 2 * TURN + len(OBSERVATION) - 1)]
        # Without what it has read of them, the server finds the first tokens that two prompts have in common.
        assert max(cached[0], cached[3]) < EPISODES
        check_logprobs(kept.config, [pair for turns in made[:3] for pair in turns], {3: 1.0}, 1e-5)
        check_logprobs(kept.config, made[3], {4: 0.7}, 1e-5)
        assert engine.metrics()["retracted_samples"] == 0


def test_a_conversation_may_fill_the_whole_context(kept: Kept, tmp_path: Path) -> None:
    prompt = np.random.default_rng(1).integers(0, 10, CONTEXT - 1).astype(np.int32)
    asked = request_of("1>", 1, samples=1, max_tokens=1, stop_ids=frozenset())
    requests = [
        replace(asked, tokens=prompt),
        replace(asked, tokens=prompt[:-5], max_tokens=6),
        replace(asked, tokens=prompt[:100], max_tokens=CONTEXT - 100),
    ]
    with engine_of(kept) as engine:
        load(kept, engine, tmp_path)
        assert engine.context_length == CONTEXT
        assert engine.cache_tokens is not None
        assert engine.cache_tokens >= CONTEXT
        made = pairs_of(requests, engine.generate(requests, silent))
    assert [len(sample.tokens) for _, sample in made] == [1, 6, CONTEXT - 100]
    check_logprobs(kept.config, made, {3: 1.0}, 5e-5)


def test_turns_given_together_have_the_same_bits_whatever_the_server_did_before(exact: Kept, tmp_path: Path) -> None:
    turns = [replace(one, max_tokens=60 + 10 * i, session="") for i, one in enumerate(first_turns())]
    found: list[list[list[Generation]]] = []

    killed: list[str] = []

    def kill_once() -> None:
        if not killed:
            killed.append("scheduler")
            exact.kill(*killed)

    with engine_of(exact, keep_partial=False, rows=1) as engine:
        load(exact, engine, tmp_path)
        for disturb in (silent, silent, kill_once):
            found.append(engine.generate(turns, disturb))
            # Beginnings of the same conversations, in the cache of the server.
            engine.generate([replace(turns[i], max_tokens=5) for i in (4, 1)], silent)
        assert engine.losses == 1
    for groups in found[1:]:
        for (a,), (b,) in zip(found[0], groups, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)

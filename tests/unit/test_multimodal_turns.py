"""Turns of a model that sees: media between turns, turns that join a running batch, and caches kept between them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relax_actors.engines.protocols import Generation, GenerationRequest, PromptMedia, TrainSample
from relax_actors.engines.protocols.media import placeholders_of
from relax_actors.engines.transformers.engine import TransformersEngine
from tests.support.batches import silent
from tests.support.tiny_media_models import MediaPrompts
from tests.unit.test_multimodal_rollout import Run

BYTES = 1 << 22
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen3_omni_moe_thinker")


@pytest.fixture(scope="module", params=FAMILIES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"), request.param)


def turns_of(run: Run, engine: TransformersEngine) -> list[GenerationRequest]:
    """Return a first turn of each prompt of the family, one sample each."""
    return [replace(request, samples=1, session=f"s{i}") for i, request in enumerate(run.requests)]


def next_turn(request: GenerationRequest, answer: Generation, make: MediaPrompts, *kinds: str) -> GenerationRequest:
    """Return the turn that follows an answer and an observation with media of these kinds."""
    said, (shown, seen) = np.concatenate([request.tokens, answer.tokens]), make.make(*kinds, text=2)
    media = request.media
    assert media is not None
    first = media.positions_of(len(said) + 1)[0, -1]
    media = media.extended(len(said), seen.positions + first, seen.items)
    return replace(request, tokens=np.concatenate([said, shown]), media=media, seed=request.seed + 50, max_tokens=6)


def check_scores(run: Run, requests: list[GenerationRequest], found: list[Generation]) -> None:
    """Compare log-probs of the sampled tokens with those of a scorer."""
    samples = [
        TrainSample.of_completion(request.tokens, one.tokens, logprobs=one.logprobs, media=request.media)
        for request, one in zip(requests, found, strict=True)
    ]
    for sample, scored in zip(samples, run.scored(1.0, samples), strict=True):
        np.testing.assert_allclose(sample.masked("logprobs"), scored[sample.loss_mask], atol=1e-5)


def test_media_between_turns_are_read_from_kept_caches_and_fresh_ones_alike(run: Run) -> None:
    kept, fresh = (TransformersEngine(run.config.model_path, kept_bytes=n) for n in (BYTES, None))
    for engine in (kept, fresh):
        engine.load(1, *run.publish(1.0))
    make = MediaPrompts(kept.model, run.family, seed=9)
    requests = turns_of(run, kept)
    for kinds in (("image",), (), ("image", "image")):
        found = [samples[0] for samples in kept.generate(requests, silent)]
        for one, (other,) in zip(found, fresh.generate(requests, silent), strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        check_scores(run, requests, found)
        requests = [next_turn(request, one, make, *kinds) for request, one in zip(requests, found, strict=True)]
    assert kept.kept is not None
    assert (kept.kept.hits, kept.kept.misses) == (2 * len(requests), len(requests))


def test_turns_with_media_join_a_running_batch(run: Run) -> None:
    engine = TransformersEngine(run.config.model_path, kept_bytes=BYTES)
    engine.load(1, *run.publish(1.0))
    requests = [replace(request, session="") for request in turns_of(run, engine)]
    first, *later = requests
    waiting = [[], later[:1], [], [], later[1:]]
    found = dict(
        pair
        for done in engine.stream([first], silent, None, lambda _: waiting.pop(0) if waiting else [])
        for pair in done
    )
    check_scores(run, requests, [found[i][0] for i in range(len(requests))])


def test_a_cache_of_other_media_with_the_same_tokens_is_not_used(run: Run) -> None:
    engine = TransformersEngine(run.config.model_path, kept_bytes=BYTES)
    engine.load(1, *run.publish(1.0))
    request = turns_of(run, engine)[0]
    ((answer,),) = engine.generate([request], silent)
    assert engine.kept is not None
    assert request.media is not None
    items = tuple(replace(item, features=item.features[::-1].copy()) for item in request.media.items)
    other = replace(request, media=replace(request.media, items=items))
    following = next_turn(other, answer, MediaPrompts(engine.model, run.family), "image")
    hits = engine.kept.hits
    check_scores(run, [following], [engine.generate([following], silent)[0][0]])
    assert engine.kept.hits == hits


def test_media_of_a_replaced_prompt_move_with_what_follows_it() -> None:
    """As a teacher reads a hint in place of the prompt."""
    none = PromptMedia.none("int32")
    line = np.broadcast_to(np.arange(4, dtype=np.int32), (3, 4))
    old, new = none.extended(0, line[:, :2], ()), none.extended(0, line + np.int32(1), ())
    whole = old.extended(5, line + np.int32(5), ())
    moved = whole.behind(old, new)
    assert moved.positions[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert moved.position_delta == new.position_delta
    assert old.behind(old, new) is new
    assert placeholders_of([moved, whole]) == 0

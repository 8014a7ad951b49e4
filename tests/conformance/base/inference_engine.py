"""Suite of `InferenceEngine`: what a rollout relies on, whichever engine generates.

`InferenceEngineConformance` holds for every engine, `LanguageModelConformance` for those that compute a real model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from broker.errors import StoreError
from relax_actors.config import Config
from relax_actors.engines.protocols import Generation, GenerationRequest, InferenceEngine
from relax_actors.messages import FinishReason
from tests.support.batches import silent
from tests.support.models import (
    ALPHABET,
    STOP,
    VOCABULARY,
    check_logprobs,
    request_of,
    stop_strings,
)

REQUESTS = [request_of("12>", 1), request_of("9081>", 2), request_of("5>", 3, temperature=0.7)]
Samples = list[list[Generation]]


def pairs_of(requests: list[GenerationRequest], groups: Samples) -> list[tuple[GenerationRequest, Generation]]:
    """Each sample with its request."""
    return [(request, sample) for request, group in zip(requests, groups, strict=True) for sample in group]


def versions_of(groups: Samples) -> set[int]:
    """All versions that wrote a token."""
    return {int(version) for group in groups for sample in group for version in sample.versions}


class Watcher:
    """Keeps the tokens that an engine shows of a request; implements `Watch`."""

    def __init__(self, cancels_after: int | None = None) -> None:
        self._cancels_after = cancels_after
        self.is_cancelled, self.wants_tokens = False, True
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.calls = 0

    def on_tokens(self, start: int, tokens: Any, logprobs: Any) -> None:
        assert len(tokens) == len(logprobs)
        self.tokens[start:], self.logprobs[start:] = tokens.tolist(), logprobs.tolist()
        self.calls += 1
        self.is_cancelled |= self._cancels_after is not None and len(self.tokens) >= self._cancels_after


class InferenceEngineConformance:
    """Laws of every engine.

    Subclasses provide the fixture `engine`, without weights and closed at the end, and `publish`.
    """

    implements: str
    """Name in the registry."""

    requests = REQUESTS
    long = replace(REQUESTS[0], max_tokens=60, stop_ids=frozenset())
    """A request that runs long enough for others, and for newer weights, to arrive."""
    short = replace(REQUESTS[1], max_tokens=2)

    @pytest.fixture
    def engine(self) -> InferenceEngine:
        raise NotImplementedError

    @pytest.fixture
    def publish(self) -> Callable[..., tuple[str, list[Path]]]:
        """Write the weights `scale` of the engine's model: fingerprint and files."""
        raise NotImplementedError

    @pytest.fixture
    def loaded(self, engine: Any, publish: Callable[..., tuple[str, list[Path]]]) -> Any:
        """The engine with version 3, the weights of scale 1."""
        engine.load(3, *publish(1.0))
        return engine

    def stage(self, engine: Any, version: int, published: tuple[str, list[Path]]) -> None:
        """Stage published weights through a verified copy, as a rollout does."""
        from relax_actors.weights.protocols import WeightUpdate

        copy = engine.empty_copy()
        copy.apply([WeightUpdate(version, *published)])
        assert (copy.version, copy.fingerprint) == (version, published[0])
        engine.stage(version, copy.tensors)

    def test_generates_nothing_before_the_first_weights(self, engine: Any) -> None:
        assert engine.version is None
        assert engine.context_length > 0
        with pytest.raises(StoreError, match="no verified weights"):
            engine.generate(self.requests, silent)
        with pytest.raises(StoreError, match="nothing can be swapped"):
            engine.swap()

    def test_refuses_weights_with_another_fingerprint_and_serves_nothing(self, loaded: Any, publish: Any) -> None:
        fingerprint, shards = publish(1.0)
        with pytest.raises(StoreError, match="published was"):
            loaded.load(9, "0" * 32, shards)
        with pytest.raises(StoreError, match="no verified weights"):
            loaded.generate(self.requests, silent)
        loaded.load(9, fingerprint, shards)
        assert versions_of(loaded.generate(self.requests, silent)) == {9}

    def test_refuses_weights_whose_file_is_damaged(self, engine: Any, publish: Any) -> None:
        fingerprint, shards = publish(1.0)
        data = bytearray(shards[0].read_bytes())
        data[-1] ^= 1
        shards[0].write_bytes(data)
        with pytest.raises(StoreError, match="published was"):
            engine.load(2, fingerprint, shards)
        with pytest.raises(StoreError, match="no verified weights"):
            engine.generate(self.requests, silent)

    def test_every_sample_has_tokens_logprobs_and_versions_of_one_length(self, loaded: Any) -> None:
        calls: list[None] = []
        groups = loaded.generate(self.requests, lambda: calls.append(None))
        assert calls
        for request, group in zip(self.requests, groups, strict=True):
            assert len(group) == request.samples
            for sample in group:
                assert 0 < len(sample.tokens) <= request.max_tokens
                assert sample.tokens.shape == sample.logprobs.shape == sample.versions.shape
                assert (sample.tokens.dtype, sample.versions.dtype) == (np.int32, np.int32)
                assert sample.logprobs.dtype == np.float32
                assert (sample.logprobs <= 0).all()
                assert np.isfinite(sample.logprobs).all()
                assert set(sample.versions) == {3}

    def test_staged_weights_are_served_after_the_swap(self, loaded: Any, publish: Any) -> None:
        self.stage(loaded, 4, publish(0.7))
        assert loaded.version == 3
        assert versions_of(loaded.generate(self.requests, silent)) == {3}
        assert loaded.swap() == loaded.version == 4
        assert versions_of(loaded.generate(self.requests, silent)) == {4}
        with pytest.raises(StoreError, match="nothing can be swapped"):
            loaded.swap()

    def test_a_row_is_returned_as_soon_as_its_samples_have_ended(self, loaded: Any) -> None:
        order = [i for done in loaded.stream([self.long, self.short], silent) for i, _ in done]
        assert order == [1, 0]

    def test_samples_continue_with_newer_weights(self, loaded: Any, publish: Any) -> None:
        made = self.generate_over_a_swap(loaded, publish(0.7))
        assert versions_of([[sample for _, sample in made]]) == {3, 4}
        for _, sample in made:
            assert (np.diff(sample.versions) >= 0).all()
        assert any(len(set(sample.versions)) == 2 for _, sample in made)

    def generate_over_a_swap(
        self, engine: Any, published: tuple[str, list[Path]]
    ) -> list[tuple[GenerationRequest, Generation]]:
        """Generate `long`; version 4 replaces version 3 after its first tokens."""
        grown = 0

        def progress() -> None:
            nonlocal grown
            grown += 1

        def refresh() -> bool:
            if grown < 2 or engine.version == 4:
                return False
            self.stage(engine, 4, published)
            return bool(engine.swap() == 4)

        return pairs_of([self.long], engine.generate([self.long], progress, refresh))

    def test_a_stream_that_is_abandoned_leaves_the_engine_usable(self, loaded: Any) -> None:
        stream = loaded.stream([self.long, self.short], silent)
        assert next(done for done in stream if done)
        with suppress(StopIteration):
            stream.close()
        assert versions_of(loaded.generate(self.requests, silent)) == {3}


class RowsJoin:
    """Law of engines that take rows while others run."""

    runs_ahead: ClassVar = False
    """Whether the engine computes while the test does not look, as a server does."""
    long: GenerationRequest
    short: GenerationRequest

    def test_rows_join_those_that_run_and_each_is_returned_when_it_ends(self, loaded: Any) -> None:
        late = [self.short, replace(self.short, max_tokens=3)]
        given: list[GenerationRequest] = []
        found: list[tuple[int, list[Generation]]] = []

        def more(most: int) -> list[GenerationRequest]:
            assert most > 0
            # The second joins once the first has been returned.
            if len(given) > len(found) or len(given) == len(late):
                return []
            given.append(late[len(given)])
            return given[-1:]

        for done in loaded.stream([self.long], silent, None, more):
            found += done
        assert [i for i, _ in found] == [1, 2, 0]
        self.check_rows([*late, self.long], [group for _, group in found])

    def test_request_that_nobody_waits_for_ends_and_the_others_go_on(self, loaded: Any) -> None:
        watch = Watcher()
        watched = replace(self.long, watch=watch, samples=1)
        asked = False

        def more(_: int) -> list[GenerationRequest]:
            nonlocal asked
            asked, before = True, asked
            return [] if before else [replace(self.short, samples=1)]

        found: list[tuple[int, list[Generation]]] = []
        for done in loaded.stream([watched], silent, None, more):
            found += done
            watch.is_cancelled |= bool(done)  # the other one has ended
        order, (sample,) = [i for i, _ in found], dict(found)[0]
        if order == [0, 1] and self.runs_ahead:
            assert len(sample.tokens) == watched.max_tokens, "it ended before anyone had left"
            return
        assert order == ([1, 0] if asked else [0]), order
        if asked:
            assert len(sample.tokens) < watched.max_tokens
            assert sample.tokens.shape == sample.logprobs.shape == sample.versions.shape

    def check_rows(self, requests: list[GenerationRequest], groups: list[list[Generation]]) -> None:
        """Compare rows with what was asked for."""
        assert [len(group) for group in groups] == [request.samples for request in requests]


class SamplesFollowSeeds:
    """Law of engines whose samples do not depend on the other rows of a batch."""

    requests: list[GenerationRequest]

    def test_samples_depend_on_the_seed_alone(self, loaded: Any) -> None:
        together = loaded.generate(self.requests, silent)
        for group, request in zip(together, self.requests, strict=True):
            for a, b in zip(group, loaded.generate([request], silent)[0], strict=True):
                np.testing.assert_array_equal(a.tokens, b.tokens)
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        others = [loaded.generate([replace(self.requests[0], seed=seed)], silent)[0] for seed in range(90, 95)]
        assert any([s.tokens.tolist() for s in a] != [s.tokens.tolist() for s in b] for a, b in pairwise(others))

    def test_greedy_sample_does_not_change_the_others(self, loaded: Any) -> None:
        more = [replace(request, samples=request.samples + 1, greedy_samples=1) for request in self.requests]
        for alone, beside in zip(loaded.generate(self.requests, silent), loaded.generate(more, silent), strict=True):
            assert [s.tokens.tolist() for s in beside[:-1]] == [s.tokens.tolist() for s in alone]


class MinTokens:
    """Law of engines that keep a sample from ending early."""

    def test_no_stop_token_is_sampled_before_min_tokens(self, loaded: Any) -> None:
        (late,) = loaded.generate([request_of("1>", 1, samples=64, min_tokens=5)], silent)
        assert min(len(sample.tokens) for sample in late) >= 5
        assert all(STOP not in sample.tokens[:4] for sample in late)

    def test_no_stop_string_ends_a_sample_before_min_tokens(self, loaded: Any) -> None:
        # All pairs: without the limit every sample would end at its second token.
        pairs = stop_strings(*(a + b for a in ALPHABET for b in ALPHABET))
        request = request_of("1>", 1, samples=16, stop_ids=frozenset(), stop_strings=pairs)
        for limit, length in ((0, 2), (1, 2), (4, 5)):
            (samples,) = loaded.generate([replace(request, min_tokens=limit)], silent)
            assert min(len(sample.tokens) for sample in samples) == length


class FollowsGrammars:
    """Law of engines that hold samples to a grammar."""

    number = 'start: number\nnumber: %json {"type": "integer", "minimum": 1000, "maximum": 1999}'

    def test_samples_follow_their_grammar_with_logprobs_of_the_whole_vocabulary(
        self, loaded: Any, config: Config
    ) -> None:
        loaded.prepare(self.number)
        # The model would end most samples early, and `min_tokens` would keep it from the end of a number.
        held = [request_of("12>", 1, samples=16, grammar=self.number)]
        held.append(replace(held[0], seed=2, temperature=0.7, greedy_samples=1))
        made = pairs_of(held, loaded.generate(held, silent))
        for _, sample in made:
            assert re.fullmatch("1[0-9]{3}#", spelled(sample))
            assert sample.finish_reason is FinishReason.STOP
        assert len({spelled(sample) for _, sample in made}) > 8
        check_logprobs(config, made, {3: 1.0}, 1e-5)

    def test_sample_that_reaches_its_limit_within_its_grammar_is_cut(self, loaded: Any) -> None:
        (samples,) = loaded.generate([request_of("12>", 1, max_tokens=3, grammar=self.number)], silent)
        for sample in samples:
            assert re.fullmatch("1[0-9]{2}", spelled(sample))
            assert sample.finish_reason is FinishReason.LENGTH

    def test_distribution_is_that_of_the_model_over_what_a_grammar_allows(self, loaded: Any, config: Config) -> None:
        held = request_of("12>", 7, samples=1000, max_tokens=1, grammar="start: /[13579]/")
        expected = self.distribution(config)
        expected[[token for token in range(VOCABULARY) if token > 9 or token % 2 == 0]] = 0
        (samples,) = loaded.generate([held], silent)
        counts = np.bincount([int(sample.tokens[0]) for sample in samples], minlength=VOCABULARY) / 1000
        np.testing.assert_allclose(counts, expected / expected.sum(), atol=0.06)
        (first,) = loaded.generate([replace(held, samples=100, top_p=1e-6)], silent)
        assert {int(sample.tokens[0]) for sample in first} == {int(expected.argmax())}

    def test_grammar_holds_over_a_swap(self, loaded: Any, config: Config, publish: Any) -> None:
        self.long = replace(self.long, stop_ids=frozenset([STOP]), grammar="start: /([0-4][5-9]){25}/")
        made = self.generate_over_a_swap(loaded, publish(0.7))
        for _, sample in made:
            assert re.fullmatch("([0-4][5-9]){25}#", spelled(sample))
            assert sorted(set(sample.versions)) == [3, 4]
        check_logprobs(config, made, {3: 1.0, 4: 0.7}, 5e-5)

    def test_sample_that_no_token_continues_ends_as_failed_and_the_others_go_on(self, loaded: Any) -> None:
        dead = request_of("12>", 1, grammar="start: /[0-9][0-9]x/")
        groups = loaded.generate([dead, self.long, replace(dead, grammar=self.number)], silent)
        assert {sample.finish_reason for sample in groups[0]} == {FinishReason.ERROR}
        assert {len(sample.tokens) for sample in groups[1]} == {self.long.max_tokens}
        assert {sample.finish_reason for sample in groups[2]} == {FinishReason.STOP}


def spelled(sample: Generation) -> str:
    """Text of a sample in `ALPHABET`."""
    return "".join(ALPHABET[token] for token in sample.tokens)

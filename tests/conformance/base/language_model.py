"""Suite of an `InferenceEngine` with a real language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_actors.config import Config
from relax_actors.messages import FinishReason
from tests.conformance.base.inference_engine import InferenceEngineConformance, Watcher, pairs_of
from tests.support.batches import silent
from tests.support.models import (
    ALPHABET,
    STOP,
    VOCABULARY,
    ReferenceModel,
    check_logprobs,
    publish,
    random_weights,
    request_of,
    stop_strings,
)


class LanguageModelConformance(InferenceEngineConformance):
    """Laws of engines that compute a model of Hugging Face format.

    Subclasses provide the fixture `config`, a run with a prepared model folder.
    """

    rounding = 1e-5
    rounding_long = 5e-5
    """Of samples of some hundred tokens, and of those read again under newer weights."""

    @pytest.fixture
    def config(self) -> Config:
        raise NotImplementedError

    @pytest.fixture
    def publish(self, config: Config, tmp_path: Path) -> Callable[..., tuple[str, list[Path]]]:
        return lambda scale: publish(random_weights(config, scale), tmp_path / f"{scale}.safetensors")

    def test_watch_sees_the_tokens_of_its_request_as_they_are_sampled(self, loaded: Any) -> None:
        watch = Watcher()
        watched = replace(self.long, watch=watch, samples=1)
        ((sample,), _) = loaded.generate([watched, replace(self.short, samples=1)], silent)
        assert watch.tokens == sample.tokens.tolist()
        assert watch.logprobs == sample.logprobs.tolist()
        assert watch.calls > 2, "the tokens come all at once"

    def test_sample_ends_at_the_token_at_which_its_watch_cancels_it(self, loaded: Any) -> None:
        long = replace(self.long, samples=1, max_tokens=200)
        watch = Watcher(cancels_after=5)
        (sample,) = loaded.generate([replace(long, watch=watch)], silent)[0]
        assert 5 <= len(sample.tokens) < 200
        assert sample.tokens[: len(watch.tokens)].tolist() == watch.tokens
        assert sample.finish_reason == FinishReason.LENGTH

    def test_logprobs_are_those_of_the_model(self, loaded: Any, config: Config) -> None:
        made = pairs_of(self.requests, loaded.generate(self.requests, silent))
        check_logprobs(config, made, {3: 1.0}, self.rounding)

    def test_logprobs_after_a_swap_are_those_of_the_newer_weights(
        self, loaded: Any, config: Config, publish: Any
    ) -> None:
        before = pairs_of(self.requests, loaded.generate(self.requests, silent))
        self.stage(loaded, 4, publish(0.7))
        loaded.swap()
        after = pairs_of(self.requests, loaded.generate(self.requests, silent))
        check_logprobs(config, [*before, *after], {3: 1.0, 4: 0.7}, self.rounding)

    def test_each_logprob_of_a_continued_sample_is_of_the_version_that_wrote_the_token(
        self, loaded: Any, config: Config, publish: Any
    ) -> None:
        made = self.generate_over_a_swap(loaded, publish(0.7))
        for _, sample in made:
            assert len(sample.tokens) == self.long.max_tokens
            assert sorted(set(sample.versions)) == [3, 4]
        check_logprobs(config, made, {3: 1.0, 4: 0.7}, self.rounding_long)

    def test_tensors_belong_to_the_caller_again_once_they_are_staged(self, loaded: Any, config: Config) -> None:
        tensors = random_weights(config, 0.7)
        loaded.stage(4, tensors)
        for tensor in tensors.values():
            tensor.zero_()
        loaded.swap()
        made = pairs_of(self.requests, loaded.generate(self.requests, silent))
        check_logprobs(config, made, {4: 0.7}, self.rounding)

    def test_a_sample_ends_at_its_stop_token_or_its_limit(self, loaded: Any) -> None:
        many = [replace(request, samples=8) for request in self.requests]
        lengths = set()
        for request, sample in pairs_of(many, loaded.generate(many, silent)):
            stopped = sample.tokens[-1] == STOP
            assert sample.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert STOP not in sample.tokens[:-1]
            assert stopped or len(sample.tokens) == request.max_tokens
            lengths.add(len(sample.tokens))
        assert lengths > {9}
        every = request_of("1>", 1, samples=1, stop_ids=frozenset(range(VOCABULARY)))
        ((sample,),) = loaded.generate([every], silent)
        assert (len(sample.tokens), sample.finish_reason) == (1, FinishReason.STOP)

    def test_a_sample_ends_at_the_token_that_completes_a_stop_string(self, loaded: Any, config: Config) -> None:
        strings = [*(a + b for a in "13579" for b in "02468"), "111", "42"]
        requests = [
            request_of(text, seed, samples=32, max_tokens=limit, stop_strings=stop_strings(*strings))
            for text, seed, limit in (("12>", 1, 40), ("9081>1", 2, 30), ("5>", 3, 3))
        ]
        made = pairs_of(requests, loaded.generate(requests, silent))
        reasons = set()
        for request, sample in made:
            text = "".join(ALPHABET[token] if token < STOP else "!" for token in sample.tokens)
            assert not any(string in text[:-1] for string in strings)
            completed = any(text.endswith(string) for string in strings)
            ended = completed or sample.tokens[-1] == STOP
            assert sample.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert ended or len(text) == request.max_tokens
            assert sample.tokens.shape == sample.logprobs.shape == sample.versions.shape
            reasons.add((completed, sample.finish_reason))
            # The prompt ends with a 1, which is no part of the text.
            reasons.add("after the prompt" if request is requests[1] and len(text) > 1 and text[0] in "02468" else "")
        assert {(True, FinishReason.STOP), (False, FinishReason.LENGTH), "after the prompt"} <= reasons
        check_logprobs(config, made, {3: 1.0}, self.rounding_long)

    def test_stop_strings_are_found_over_a_swap(self, loaded: Any, config: Config, publish: Any) -> None:
        three = stop_strings(*(a + b + c for a in "0123" for b in ALPHABET for c in "456"))
        self.long = replace(self.long, samples=32, stop_strings=three)
        made = self.generate_over_a_swap(loaded, publish(0.7))
        for request, sample in made:
            assert three.find(sample.tokens.tolist()) in (len(sample.tokens), None)
            ended = three.find(sample.tokens.tolist()) is not None
            assert sample.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert ended or len(sample.tokens) == request.max_tokens
        assert {4} <= {int(sample.versions[-1]) for _, sample in made if sample.finish_reason is FinishReason.STOP}
        check_logprobs(config, made, {3: 1.0, 4: 0.7}, self.rounding_long)

    def test_greedy_takes_the_likeliest_token(self, loaded: Any, config: Config) -> None:
        reference = ReferenceModel(config, random_weights(config))
        for seed in (1, 2):
            greedy = [replace(request, samples=1, greedy_samples=1, seed=seed) for request in self.requests]
            for request, (sample,) in zip(greedy, loaded.generate(greedy, silent), strict=True):
                assert sample.tokens.tolist() == reference.likeliest(request)
                np.testing.assert_allclose(sample.logprobs, reference.logprobs(request, sample), atol=self.rounding)

    def test_greedy_sample_beside_others_has_the_likeliest_tokens(self, loaded: Any, config: Config) -> None:
        reference = ReferenceModel(config, random_weights(config))
        more = [replace(request, samples=request.samples + 1, greedy_samples=1) for request in self.requests]
        for request, samples in zip(self.requests, loaded.generate(more, silent), strict=True):
            assert len(samples) == request.samples + 1
            assert samples[-1].tokens.tolist() == reference.likeliest(request)

    def test_sampled_tokens_follow_the_distribution_of_the_model(self, loaded: Any, config: Config) -> None:
        (samples,) = loaded.generate([request_of("12>", 7, samples=1000, max_tokens=1)], silent)
        counts = np.bincount([int(sample.tokens[0]) for sample in samples], minlength=VOCABULARY) / 1000
        np.testing.assert_allclose(counts, self.distribution(config), atol=0.06)

    def test_top_p_samples_from_the_smallest_set_that_reaches_it(self, loaded: Any, config: Config) -> None:
        (samples,) = loaded.generate([request_of("12>", 7, samples=500, max_tokens=1, top_p=0.5)], silent)
        expected = self.distribution(config)
        order = np.argsort(-expected)
        size = int((np.cumsum(expected[order]) < 0.5).sum()) + 1
        assert 1 < size < VOCABULARY
        assert {int(sample.tokens[0]) for sample in samples} == set(order[:size].tolist())

    def distribution(self, config: Config) -> Any:
        """Probabilities of the first token after "12>", `[vocab] float32`."""
        request = request_of("12>", 7)
        return ReferenceModel(config, random_weights(config)).logits(request.tokens.tolist())[-1].softmax(-1).numpy()

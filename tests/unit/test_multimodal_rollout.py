"""The transformers engine samples with media from the distribution that scorers and the trainer compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from relax_actors.config import Config
from relax_actors.engines.protocols import Generation, GenerationRequest, TrainSample
from relax_actors.engines.torch.scorer import TorchScorer
from relax_actors.engines.transformers.engine import TransformersEngine
from relax_actors.media.family import Family, family_of
from relax_actors.messages import Sample, TokenSequence, Trajectory
from relax_actors.training.validation import RowValidator
from tests.support.batches import silent
from tests.support.messages import assert_says
from tests.support.models import config_of, publish, random_weights
from tests.support.tiny_media_models import FAMILIES, architecture_of, prompts_of

TOKENS, TEMPERATURE = 12, 0.8


class Run:
    """A run of one family: configuration, prompts with media, and weights that want to sample placeholders."""

    def __init__(self, folder: Path, model_type: str) -> None:
        self.folder = folder
        made = config_of(folder, architecture_of(model_type))
        # That of the requests, at which scorers compute, too.
        cooler = made.rollout.model_copy(update={"temperature": TEMPERATURE})
        self.config: Config = made.model_copy(update={"rollout": cooler})
        family = family_of(self.config.model_path)
        assert family is not None
        self.family: Family = family
        engine = TransformersEngine(self.config.model_path)
        self.requests = [
            GenerationRequest(tokens, seed, 3, TEMPERATURE, 1.0, TOKENS - seed, frozenset(), media=media)
            for seed, (tokens, media) in enumerate(prompts_of(engine.model, family))
        ]

    def weights(self, scale: float) -> dict[str, Tensor]:
        """Draw weights whose head prefers the family's special tokens to all others."""
        found = random_weights(self.config, scale)
        found["lm_head.weight"][list(self.family.barred)] *= 20
        return found

    def publish(self, scale: float) -> tuple[str, list[Path]]:
        """Write weights as a trainer does."""
        return publish(self.weights(scale), self.folder / f"weights-{scale}.safetensors")

    def scored(self, scale: float, samples: list[TrainSample]) -> list[np.ndarray]:
        """Score samples as `reference` and `actor_fwd` do."""
        scorer = TorchScorer(self.config)
        scorer.load(1, *self.publish(scale))
        return scorer.score(samples, lambda: None)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) if name == "qwen3_5" else name for name in FAMILIES],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"), request.param)


def samples_of(requests: list[GenerationRequest], groups: list[list[Generation]]) -> list[TrainSample]:
    return [
        TrainSample.of_completion(
            request.tokens, sample.tokens, logprobs=sample.logprobs, versions=sample.versions, media=request.media
        )
        for request, group in zip(requests, groups, strict=True)
        for sample in group
    ]


def test_log_probs_are_those_of_a_scorer_and_placeholders_are_never_sampled(run: Run) -> None:
    engine = TransformersEngine(run.config.model_path)
    engine.load(1, *run.publish(1.0))
    samples = samples_of(run.requests, engine.generate(run.requests, silent))
    assert not set(run.family.barred) & {int(t) for s in samples for t in s.token_ids[s.loss_mask]}
    for sample, scored in zip(samples, run.scored(1.0, samples), strict=True):
        np.testing.assert_allclose(sample.masked("logprobs"), scored[sample.loss_mask], atol=1e-5)


def test_samples_depend_on_their_media_alone(run: Run) -> None:
    engine = TransformersEngine(run.config.model_path)
    engine.load(1, *run.publish(1.0))
    together = engine.generate(run.requests, silent)
    for request, group in zip(run.requests, together, strict=True):
        (alone,) = engine.generate([request], silent)
        for one, other in zip(alone, group, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_newer_weights_encode_the_media_of_running_samples_again(run: Run) -> None:
    engine = TransformersEngine(run.config.model_path)
    engine.load(1, *run.publish(1.0))
    calls = iter(range(100))

    def refresh() -> bool:
        if next(calls) != 4:
            return False
        engine.stage(2, run.weights(0.7))
        engine.swap()
        return True

    samples = samples_of(run.requests, engine.generate(run.requests, silent, refresh))
    assert {int(v) for s in samples for v in s.masked("versions")} == {1, 2}
    for version, scale in ((1, 1.0), (2, 0.7)):
        for sample, scored in zip(samples, run.scored(scale, samples), strict=True):
            assert sample.versions is not None
            assert sample.logprobs is not None
            wrote = sample.loss_mask & (sample.versions == version)
            np.testing.assert_allclose(sample.logprobs[wrote], scored[wrote], atol=1e-5)


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_omni_moe_thinker"])
def test_recorded_experts_of_media_are_replayed(tmp_path: Path, model_type: str) -> None:
    run = Run(tmp_path, model_type)
    engine = TransformersEngine(run.config.model_path, records_experts=True)
    engine.load(1, *run.publish(1.0))
    request = run.requests[0]
    (group,) = engine.generate([request], silent)
    replaying = run.config.trainer.model_copy(update={"router_replay": True})
    rollout = run.config.rollout.model_copy(update={"temperature": request.temperature})
    scorer = TorchScorer(run.config.model_copy(update={"trainer": replaying, "rollout": rollout}))
    scorer.load(1, *run.publish(1.0))
    for generation in group:
        assert generation.routed_experts is not None
        sample = TrainSample.of_completion(
            request.tokens, generation.tokens, routed_experts=generation.routed_experts, media=request.media
        )
        (scored,) = scorer.score([sample], silent)
        np.testing.assert_allclose(scored[sample.loss_mask], generation.logprobs, atol=1e-5)
        (other,) = scorer.score([replace(sample, routed_experts=(generation.routed_experts + 1) % 4)], silent)
        assert np.abs(other - scored).max() > 1e-3


def test_a_sample_with_a_barred_token_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, "qwen3_vl")
    barred, prompt = run.family.barred[0], run.requests[0].tokens
    tokens = np.array([1, barred], np.int32)
    sequence = TokenSequence.of_completion(prompt, tokens, np.zeros(2, np.float32), np.zeros(2, np.int32))
    trajectory = Trajectory.of(prompt, [Sample((sequence,))], {})
    why = RowValidator(run.config).of_trajectory(trajectory, 0)
    assert_says(why, barred, "never sampled")

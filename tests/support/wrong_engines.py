"""Inference engines with silent faults that were published for other systems; they raise no error."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch._C._distributed_c10d import Store

from relax_actors.config import Config
from relax_actors.engines.protocols import Generation, InferenceEngine
from relax_actors.engines.protocols.inference import Done
from relax_actors.engines.protocols.training import RankEngine
from relax_actors.engines.torch.backend import TorchTrainingBackend
from relax_actors.engines.transformers.backend import TransformersBackend
from relax_actors.messages import FinishReason
from relax_actors.runtime import Context


class NeverUpdated(TransformersBackend):
    """Reports every new version, and goes on to compute with the first one (verl-project/verl#7495)."""

    def build(self, context: Context) -> InferenceEngine:
        engine: Any = super().build(context)
        stage, first = engine.stage, {}

        def stage_first(version: int, tensors: Mapping[str, Any]) -> None:
            if not first:
                first.update({name: tensor.clone() for name, tensor in tensors.items()})
            stage(version, first)

        engine.stage = stage_first
        return engine


class _Changed(TransformersBackend):
    """Changes the samples that the engine returns."""

    def change(self, sample: Generation) -> Generation:
        """Return a sample with a fault."""
        return sample

    def change_group(self, samples: list[Generation]) -> list[Generation]:
        """Return the samples of a request with a fault."""
        return [self.change(sample) for sample in samples]

    def build(self, context: Context) -> InferenceEngine:
        engine: Any = super().build(context)
        stream = engine.stream

        def changed(*arguments: Any, **options: Any) -> Iterator[Done]:
            for done in stream(*arguments, **options):
                yield [(i, self.change_group(samples)) for i, samples in done]

        engine.stream = changed
        return engine


class OtherTemperature(_Changed):
    """Returns log-probs that are not those of the distribution that it samples from."""

    def change(self, sample: Generation) -> Generation:
        return replace(sample, logprobs=sample.logprobs * 0.7)


class SameRandomNumbers(_Changed):
    """Draws all samples of a group with the same random numbers."""

    def change_group(self, samples: list[Generation]) -> list[Generation]:
        return samples[:1] * len(samples)


class WrongPositions(_Changed):
    """Returns wrong log-probs late in a sample, as with other positions than the trainer (vllm-project/vllm#42125)."""

    def change(self, sample: Generation) -> Generation:
        late = np.arange(len(sample.logprobs)) >= len(sample.logprobs) // 2
        return replace(sample, logprobs=np.where(late, 0.6 * sample.logprobs, sample.logprobs).astype(np.float32))


class ProfilerTaken(TorchTrainingBackend):
    """Has a second rank whose first profile does not begin, as if another tool used the GPU's profiler."""

    def build_rank(self, config: Config, rank: int, store: Store) -> RankEngine:
        engine: Any = super().build_rank(config, rank, store)
        begin, refusals = engine.begin_profile, [] if rank == 0 else ["the profiler is used by another tool"]

        def begin_profile() -> None:
            if refusals:
                raise RuntimeError(refusals.pop())
            begin()

        engine.begin_profile = begin_profile
        return engine


class StalePrefix(_Changed):
    """Returns wrong log-probs early in a sample, as with a cached prefix of earlier weights."""

    def change(self, sample: Generation) -> Generation:
        early = np.arange(len(sample.logprobs)) < len(sample.logprobs) // 2
        return replace(sample, logprobs=np.where(early, 0.6 * sample.logprobs, sample.logprobs).astype(np.float32))


class WithoutEnd(_Changed):
    """Leaves out the end token of samples that end by themselves, as engines that return text do."""

    def change(self, sample: Generation) -> Generation:
        if sample.finish_reason is not FinishReason.STOP or len(sample.tokens) < 2:
            return sample
        parts = {name: getattr(sample, name)[:-1] for name in ("tokens", "logprobs", "versions")}
        return replace(sample, **parts)


class SlowThird(TransformersBackend):
    """Takes longer for each token in rollout actor 2."""

    def build(self, context: Context) -> InferenceEngine:
        engine: Any = super().build(context)
        stream = engine.stream

        def delayed(*arguments: Any, **options: Any) -> Iterator[Done]:
            for done in stream(*arguments, **options):
                threading.Event().wait(0.2 if context.n == 2 else 0.0)
                yield done

        engine.stream = delayed
        return engine

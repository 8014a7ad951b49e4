"""Inference engines with silent faults that were published for other systems; they raise no error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from relax_actors.engines.protocols import InferenceEngine
from relax_actors.engines.transformers.backend import TransformersBackend
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


class OtherTemperature(TransformersBackend):
    """Returns log-probs that are not those of the distribution that it samples from."""

    def build(self, context: Context) -> InferenceEngine:
        engine: Any = super().build(context)
        stream = engine.stream

        def scaled(*arguments: Any, **options: Any) -> Iterator[Any]:
            for done in stream(*arguments, **options):
                yield [(i, [replace(s, logprobs=s.logprobs * 0.7) for s in samples]) for i, samples in done]

        engine.stream = scaled
        return engine

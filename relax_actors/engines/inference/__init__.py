"""Engines that generate: one protocol, one file an engine."""

from relax_actors.engines.inference.protocol import Done, Generation, GenerationRequest, InferenceEngine

__all__ = ["Done", "Generation", "GenerationRequest", "InferenceEngine"]

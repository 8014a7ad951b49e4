"""Engines that generate: one protocol, one file an engine."""

from relax_actors.engines.inference.protocol import Generation, GenerationRequest, InferenceEngine

__all__ = ["Generation", "GenerationRequest", "InferenceEngine"]

"""Protocols of the engines that generate, score and train, and the data that they exchange with roles."""

from relax_actors.engines.protocols.inference import Done, Generation, GenerationRequest, InferenceEngine
from relax_actors.engines.protocols.scoring import ScoringEngine
from relax_actors.engines.protocols.sequences import Sequences
from relax_actors.engines.protocols.training import StepResult, TrainBatch, TrainingEngine, train

__all__ = [
    "Done",
    "Generation",
    "GenerationRequest",
    "InferenceEngine",
    "ScoringEngine",
    "Sequences",
    "StepResult",
    "TrainBatch",
    "TrainingEngine",
    "train",
]

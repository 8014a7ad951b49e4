"""Protocols of engines that generate, score and train, and the data that they exchange with roles."""

from relax_actors.engines.protocols.critic import CriticEngine
from relax_actors.engines.protocols.inference import Done, Generation, GenerationRequest, InferenceEngine
from relax_actors.engines.protocols.media import MediaItem, PromptMedia
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.scoring import Scores, ScoringEngine, TeacherEngine
from relax_actors.engines.protocols.stop_strings import StopStrings
from relax_actors.engines.protocols.training import StepResult, TrainingEngine, train

__all__ = [
    "CriticEngine",
    "Done",
    "Generation",
    "GenerationRequest",
    "InferenceEngine",
    "MediaItem",
    "PromptMedia",
    "Scores",
    "ScoringEngine",
    "StepResult",
    "StopStrings",
    "TeacherEngine",
    "TrainSample",
    "TrainingEngine",
    "train",
]

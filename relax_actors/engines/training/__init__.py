"""Engines that train: one protocol, one file an engine."""

from relax_actors.engines.sequences import Sequences
from relax_actors.engines.training.protocol import Offers, StepResult, TrainBatch, TrainingEngine, train

__all__ = ["Offers", "Sequences", "StepResult", "TrainBatch", "TrainingEngine", "train"]

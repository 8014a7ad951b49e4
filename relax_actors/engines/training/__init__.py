"""Engines that train: one protocol, one file an engine."""

from relax_actors.engines.sequences import Sequences
from relax_actors.engines.training.protocol import StepResult, TrainBatch, TrainingEngine, train

__all__ = ["Sequences", "StepResult", "TrainBatch", "TrainingEngine", "train"]

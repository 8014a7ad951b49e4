"""Engines that train: one protocol, one file an engine."""

from relax_actors.engines.training.protocol import Sequences, StepResult, TrainBatch, TrainingEngine

__all__ = ["Sequences", "StepResult", "TrainBatch", "TrainingEngine"]

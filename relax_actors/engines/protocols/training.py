"""Protocol of engines that train.

The trainer's state is a checkpoint plus the batches after it, so a step must be a function of weights, optimizer state,
batch and step number, and of nothing else. An engine is one process, or the front of a group of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.weights.protocols import WeightProducer


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step measured: `loss`, `gradient_norm`, `clip_fraction`, `kl`, mismatch figures, ..."""

    metrics: Mapping[str, float]


class TrainingEngine(WeightProducer, Protocol):
    """One model with its optimizer."""

    def initialise(self, seed: int) -> None:
        """Take the model folder's weights, or draw random ones from `seed`; a fresh optimizer."""

    def warm_start(
        self, samples: Sequence[TrainSample], learning_rate: float, progress: Callable[[], None]
    ) -> StepResult:
        """One supervised step on the completions, with an optimizer that `initialise` or `finish_warm_start` ends."""

    def finish_warm_start(self) -> None:
        """Begin the run proper: a fresh optimizer, and the weights as they are now as the reference for KL."""

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Forward and backward of some of the next step's rows; calls `progress` at every micro-batch.

        Does not change the weights: another thread may be writing them out.
        """

    def discard(self) -> None:
        """Forget what was accumulated since the last step."""

    def step(self, step: int, progress: Callable[[], None]) -> StepResult:
        """Optimizer step number `step` on what was accumulated, normalised as one batch.

        Raises:
            ValueError: nothing was.
        """

    def save(self, folder: Path) -> None:
        """Write a checkpoint from which `load` goes on exactly."""

    def load(self, folder: Path) -> None:
        """Take a checkpoint."""


@runtime_checkable
class SavesMeanwhile(Protocol):
    """An engine that can write a checkpoint while it steps on."""

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """As `save`, of this moment: the files are written meanwhile, and what is given waits for them.

        One at a time; that is called in the same thread, between two steps.
        """


def train(
    engine: TrainingEngine, samples: Sequence[TrainSample], step: int, progress: Callable[[], None]
) -> StepResult:
    """Optimizer step number `step` on one batch that is all there."""
    engine.accumulate(samples, progress)
    return engine.step(step, progress)

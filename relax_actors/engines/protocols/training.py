"""What the trainer actor needs of an engine.

The trainer's state is a checkpoint plus the batches after it, so a step must be a function of (weights, optimizer
state, batch, step) and nothing else. An engine may be one process or the ranks of a group behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from relax_actors.engines.protocols.sequences import Sequences
from relax_actors.weights.protocols import WeightProducer


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples of a step in the order of its batch cell.

    `old_logprobs[i] [len] float32` belong to `sequences.completions[i]`; `advantages [samples] float32`.
    `proximal_logprobs[i] [len] float32` come from column `actor_fwd`, if algorithm.proximal asks for it;
    `reference_logprobs[i] [len] float32` from column `reference`, if there are actors that compute it. `samples` is the
    number of samples of each row: with run.deterministic what is not trained is scored row by row.
    """

    sequences: Sequences
    old_logprobs: Sequence[NDArray[Any]]
    advantages: NDArray[Any]
    proximal_logprobs: Sequence[NDArray[Any]] | None = None
    reference_logprobs: Sequence[NDArray[Any]] | None = None
    samples: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step measured: `loss`, `gradient_norm`, `clip_fraction`, `kl`, mismatch figures, ..."""

    metrics: Mapping[str, float]


class TrainingEngine(WeightProducer, Protocol):
    """One model with its optimizer."""

    def initialise(self, seed: int) -> None:
        """Take the model folder's weights, or draw random ones from `seed`; a fresh optimizer."""

    def warm_start(self, sequences: Sequences, learning_rate: float, progress: Callable[[], None]) -> StepResult:
        """One supervised step on the completions, with an optimizer that `initialise` or `finish_warm_start` ends."""

    def finish_warm_start(self) -> None:
        """Begin the run proper: a fresh optimizer, and the weights as they are now as the reference for KL."""

    def accumulate(self, batch: TrainBatch, progress: Callable[[], None]) -> None:
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


def train(engine: TrainingEngine, batch: TrainBatch, step: int, progress: Callable[[], None]) -> StepResult:
    """Optimizer step number `step` on one batch that is all there."""
    engine.accumulate(batch, progress)
    return engine.step(step, progress)

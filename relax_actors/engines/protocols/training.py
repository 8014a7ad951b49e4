"""Protocol of training engines.

The state of the trainer is a checkpoint plus the batches after it. A step must therefore depend on nothing but weights,
optimizer state, batch and step number. An engine is one process, or the driver of a group of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from numpy.typing import NDArray

from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.runtime.device_lock import ReleasesMemory
from relax_actors.runtime.profiles import SupportsProfile
from relax_actors.weights.protocols import SupportsPrefixes, WeightProducer

GRADIENT_OF = "gradient/"
"""Begins the names of measurements that are the norm of a tensor's gradients; see `MeasuresGradients`."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step.

    Attributes:
        metrics: by name: `loss`, `grad_norm` (norm of the gradients before clipping), `clipped`, `kl`, ...
        micro_batches: measurements of each micro-batch, as sums over its tokens, in the order of the computation; those
            of data-parallel ranks follow each other. Empty if the engine gives none.
    """

    metrics: Mapping[str, float]
    micro_batches: Sequence[Mapping[str, float]] = ()


def gradient_norms(squares: Mapping[str, float], scale: float = 1.0) -> dict[str, float]:
    """Return the norms of a micro-batch by the names of `MeasuresGradients`.

    Args:
        squares: sum of the squares of each tensor's gradients.
        scale: factor of the gradients that were squared, as of a scaled loss.
    """
    norms = {f"{GRADIENT_OF}{name}": math.sqrt(square) / scale for name, square in sorted(squares.items())}
    return {"gradient": math.sqrt(math.fsum(squares.values())) / scale} | norms


class AccumulatesSteps(Protocol):
    """Engine that accumulates gradients of a step's rows, then updates its model."""

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Run forward and backward for sequences of the next step, and add up the gradients.

        May keep sequences back for a later call or for `step`, if the calls so far alone decide which. Calls `progress`
        after every micro-batch. Must not change the weights: another thread may be publishing them. After an error call
        `discard`.

        Raises:
            ValueError: a sequence is empty, longer than a micro-batch, or lacks an array that the algorithm reads.
        """

    def discard(self) -> None:
        """Discard the gradients accumulated since the last step."""

    def step(self, step: int, progress: Callable[[], None]) -> StepResult:
        """Update the model with the accumulated gradients, normalised as one batch.

        With several updates a batch it is called several times for a step, which has one learning rate.

        Raises:
            ValueError: nothing was accumulated.
            FloatingPointError: the gradient norm is not finite.
        """


class SavesState(Protocol):
    """Engine whose state is saved in checkpoints."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint; after `load`, training continues bit for bit."""

    def load(self, folder: Path) -> None:
        """Load a checkpoint."""

    def fingerprint(self) -> str:
        """Return the fingerprint of the weights."""


class TrainingEngine(AccumulatesSteps, SavesState, WeightProducer, Protocol):
    """Trains one model with its optimizer."""

    def initialise(self, seed: int) -> None:
        """Load the weights of the model folder, or draw random ones from `seed`; create a new optimizer."""

    def warm_start(
        self, samples: Sequence[TrainSample], learning_rate: float, progress: Callable[[], None]
    ) -> StepResult:
        """Take one supervised step on the trained tokens.

        `finish_warm_start` discards the state of its optimizer.
        """

    def finish_warm_start(self) -> None:
        """Create a new optimizer, and make the current weights the reference of the KL."""


Score: TypeAlias = Callable[[Sequence[TrainSample], Callable[[], None]], Sequence[NDArray[Any]]]
"""Compute an array `[len] float32` for each sequence; calls the second argument after every micro-batch."""


@runtime_checkable
class SupportsScore(Protocol):
    """Training engine that can score with its current weights, for several updates a batch."""

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> Sequence[NDArray[Any]]:
        """Compute log-probs of each sequence with the current weights; see `ScoringEngine.score`."""


@runtime_checkable
class SupportsAsyncSave(Protocol):
    """Training engine that can write a checkpoint while it continues to train."""

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Copy the state and write its checkpoint in the background; return a function that waits for the files.

        The returned function raises the error of the write, if any. It is called in the same thread, between two steps,
        before the next `begin_save`.
        """


@runtime_checkable
class MeasuresGradients(Protocol):
    """Engine that can measure the gradients of each micro-batch, for a replay; training does not pay for it."""

    def measure_gradients(self) -> None:
        """Add norms of gradients to the measurements of micro-batches, from the next step on.

        They are norms of the gradients that have been accumulated up to a micro-batch: `gradient` over all tensors, and
        `GRADIENT_OF` + name for each tensor. Ranks that share a step compute one micro-batch each at a time; these have
        the same norms, of the sum over all ranks.
        """


class RankEngine(
    TrainingEngine,
    SupportsScore,
    SupportsAsyncSave,
    SupportsPrefixes,
    SupportsProfile,
    MeasuresGradients,
    ReleasesMemory,
    Protocol,
):
    """Engine of one rank of several.

    Methods are collective: all ranks must call them in the same order with the same arguments. Metrics and log-probs
    are the same on all ranks; fingerprints and deltas are those of rank 0.
    """

    def cancel_profile(self) -> None:
        """Stop the recording of a profile, if there is one, without writing it."""


def train(
    engine: TrainingEngine, samples: Sequence[TrainSample], step: int, progress: Callable[[], None]
) -> StepResult:
    """Take optimizer step number `step` on one complete batch."""
    engine.accumulate(samples, progress)
    return engine.step(step, progress)

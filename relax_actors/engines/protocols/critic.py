"""Protocol of critics: a value model with its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.engines.protocols.training import AccumulatesSteps, SavesState, SupportsAsyncSave
from relax_actors.runtime.device_lock import ReleasesMemory


class CriticEngine(AccumulatesSteps, SavesState, Protocol):
    """Trains one value model on the returns of a step's rows, and computes values of sequences."""

    def initialise(self, policy: Sequence[Path] | None) -> None:
        """Initialise the weights and the optimizer.

        Args:
            policy: files of version 0 of the policy, whose layers the critic takes over, with a value head of zeros.
                None to load critic.path.

        Raises:
            ConfigError: the weights do not fit the model.
        """

    def values(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> Sequence[NDArray[Any]]:
        """Compute the value of the state before each trained token.

        The same sequences in one call give the same bits in any process.

        Args:
            samples: the sequences.
            progress: called after every micro-batch.

        Returns:
            `[len] float32` for each sequence, 0 where `loss_mask` is false.
        """

    def export(self, folder: Path) -> None:
        """Write the critic as a Hugging Face folder, which critic.path can name."""


class RankCritic(CriticEngine, SupportsAsyncSave, ReleasesMemory, Protocol):
    """Critic of one rank of several; see `RankEngine`."""

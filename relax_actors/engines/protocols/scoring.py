"""Protocol of engines that only score: log-probs under one set of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.weights.protocols import WeightConsumer


class ScoringEngine(WeightConsumer, Protocol):
    """Scores with one version of the weights at a time, and with none before the first."""

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> Sequence[NDArray[Any]]:
        """Return log-probs of each sequence's tokens, `[len] float32`, 0 where `loss_mask` is false.

        Natural log of the softmax at the sampling temperature. The same sequences, passed together, give the same bits.

        Raises:
            StoreError: no weights are loaded.
            ValueError: a sequence is empty, or longer than a micro-batch may be.
        """

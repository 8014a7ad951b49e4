"""What an actor that only scores needs of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from relax_actors.engines.protocols.sequences import Sequences
from relax_actors.weights.protocols import WeightConsumer


class ScoringEngine(WeightConsumer, Protocol):
    """Gives log-probs under one set of weights at a time; serves nothing before the first."""

    def score(self, sequences: Sequences, progress: Callable[[], None]) -> Sequence[NDArray[Any]]:
        """Log-probs of each completion's tokens, `[len] float32`: natural, of the softmax at the sampling temperature.

        The same sequences, handed over together, give the same bits.

        Raises:
            StoreError: no weights are loaded.
            ValueError: a sequence is empty, or longer than a micro-batch may be.
        """

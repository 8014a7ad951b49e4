"""Protocols of engines that compute log-probs of given sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.weights.protocols import WeightConsumer


class ScoringEngine(WeightConsumer, Protocol):
    """Scores with one weight version at a time; scores nothing before the first `load`."""

    def score(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> Sequence[NDArray[Any]]:
        """Compute log-probs of the tokens of each sequence.

        The same sequences in one call give the same bits in any process.

        Args:
            samples: the sequences.
            progress: called after every micro-batch.

        Returns:
            `[len] float32` for each sequence: natural log of the softmax at the sampling temperature, 0 where
            `loss_mask` is false.

        Raises:
            StoreError: no weights are loaded.
            ValueError: a sequence is empty, or longer than trainer.max_tokens_per_microbatch.
        """


@runtime_checkable
class SupportsSquares(Protocol):
    """Scoring engine that also computes sums of squared probabilities, for the optimal token baseline."""

    def squares(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> Sequence[NDArray[Any]]:
        """Compute the sum of the squared probabilities of the whole vocabulary at each token; see `score`."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs of one sequence under a teacher.

    Attributes:
        logprobs: `[len] float32`, of the tokens; 0 where `loss_mask` is false.
        top_ids: `[trained, k] int32`, the k most likely tokens at each trained token, the most likely first.
        top_logprobs: `[trained, k] float32`, their log-probs.
    """

    logprobs: NDArray[Any]
    top_ids: NDArray[Any]
    top_logprobs: NDArray[Any]


class TeacherEngine(Protocol):
    """Scores with the weights of a teacher."""

    def score_top(self, samples: Sequence[TrainSample], top_k: int, progress: Callable[[], None]) -> Sequence[Scores]:
        """Compute log-probs of each sequence and of the `top_k` most likely tokens, if not 0, at each trained token.

        `progress` is called after every micro-batch or request.

        Raises:
            StoreError: no weights are loaded.
            ValueError: a sequence is empty, or longer than trainer.max_tokens_per_microbatch.
            ActorError: a teacher in another process does not answer.
        """

    def close(self) -> None:
        """Release memory and connections."""

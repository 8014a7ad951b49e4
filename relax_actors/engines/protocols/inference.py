"""What a rollout actor needs of an engine.

The shape fits an in-process model as well as servers behind HTTP: weights come as a version with files to load,
requests go by token ids, and a long generation says that it goes on through `progress`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from relax_actors.messages import FinishReason
from relax_actors.weights.protocols import WeightConsumer

Refresh: TypeAlias = Callable[[], bool]
"""Swaps an engine to weights that are newer than those in use, if some are ready; tells whether it did."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and how to sample from it.

    `tokens [prompt_len] int32`; the random numbers of its `samples` come from `seed` alone. With `greedy` the
    likeliest token is taken and temperature only used for the log-probs. No stop token is chosen before `min_tokens`.
    """

    tokens: NDArray[Any]
    seed: int
    samples: int
    temperature: float
    top_p: float
    max_tokens: int
    stop_ids: frozenset[int]
    greedy: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One sample: `tokens [len] int32`, the stop token included; `logprobs [len] float32`; `versions [len] int32`.

    Log-probs are natural, of the softmax at the request's temperature over the whole vocabulary. `routed_experts
    [prompt_len + len - 1, moe_layers, experts_of_token]`, integers, are the experts that were chosen for each token but
    the last, in the order of the router's weights or in any, -1 where it is not known; of engines that record them.
    """

    tokens: NDArray[Any]
    logprobs: NDArray[Any]
    versions: NDArray[Any]
    finish_reason: FinishReason
    routed_experts: NDArray[Any] | None = None


More: TypeAlias = Callable[[int], Sequence[GenerationRequest]]
"""Gives requests that came meanwhile, at most as many as asked for."""
Done: TypeAlias = list[tuple[int, list[Generation]]]
"""Requests that are through, by their place in the order in which they came, each with its samples."""


def nothing_more(most: int) -> Sequence[GenerationRequest]:
    """No requests; see `More`."""
    del most
    return ()


class InferenceEngine(WeightConsumer, Protocol):
    """Generates with one set of weights at a time; serves nothing before the first `load`."""

    @property
    def context_length(self) -> int:
        """Tokens that prompt and completion may have together."""

    def stream(
        self,
        requests: Sequence[GenerationRequest],
        progress: Callable[[], None],
        refresh: Refresh | None = None,
        more: More = nothing_more,
    ) -> Iterator[Done]:
        """Generate all samples of all requests, and give those of a request as soon as they have ended.

        With `refresh` samples that run go on with newer weights: it is called between two tokens, what was generated
        stays with its log-probs and versions, and the next token is that of the new weights after all before it. An
        engine that can take requests in while others run asks `more` for them, as many as it has room for.
        """


class GeneratesAll:
    """For engines that `stream`: everything at its end."""

    def generate(
        self: InferenceEngine,
        requests: Sequence[GenerationRequest],
        progress: Callable[[], None],
        refresh: Refresh | None = None,
    ) -> list[list[Generation]]:
        """The samples of each request, in order; see `InferenceEngine.stream`."""
        found = dict(pair for done in self.stream(requests, progress, refresh) for pair in done)
        return [found[i] for i in range(len(requests))]

"""Protocol of inference engines, which rollout actors generate with.

It fits models in this process and servers behind HTTP: weights arrive as versions with files to load, requests consist
of token ids, and long generations call `progress` to show that they are alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.engines.protocols.stop_strings import StopStrings
from relax_actors.engines.protocols.watch import Watch
from relax_actors.errors import ConfigError
from relax_actors.messages import FinishReason
from relax_actors.weights.protocols import WeightConsumer

Refresh: TypeAlias = Callable[[], bool]
"""Swap the engine to newer weights if some are ready; return whether it did."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and its sampling parameters.

    Attributes:
        tokens: `[prompt_len] int32`.
        seed: sole source of the random numbers of all samples.
        samples: number of samples, greedy ones included.
        temperature: divisor of the logits, for sampling and log-probs.
        top_p: probability mass to sample from; does not change log-probs.
        max_tokens: largest number of tokens of a sample.
        stop_ids: tokens that end a sample.
        greedy_samples: how many of the samples, the last ones, choose the most likely token at every position; the
            temperature then applies to log-probs only. They do not change the other samples.
        min_tokens: number of tokens before which no stop token is sampled and no stop string ends a sample.
        stop_strings: strings that end a sample; None if there are none.
        media: media and positions of the prompt; None for a model that reads text only.
        session: conversation of one sample that the prompt continues; an engine may keep its keys and values for the
            next request of the session. Empty if none follows.
        watch: follows a request of one sample while it is generated; None if nobody does.
        grammar: that all samples follow (`relax_actors.data.grammar`): tokens that it forbids are not sampled, and it
            alone decides where a stop token may come, whatever `min_tokens` is. Like `top_p`, it does not change
            log-probs. A sample that cannot go on ends with the reason "error". Empty for none.
    """

    tokens: NDArray[Any]
    seed: int
    samples: int
    temperature: float
    top_p: float
    max_tokens: int
    stop_ids: frozenset[int]
    greedy_samples: int = 0
    min_tokens: int = 0
    stop_strings: StopStrings | None = None
    media: PromptMedia | None = None
    session: str = ""
    watch: Watch | None = None
    grammar: str = ""

    def is_greedy(self, sample: int) -> bool:
        """Whether a sample, by its index, chooses the most likely tokens."""
        return sample >= self.samples - self.greedy_samples

    @property
    def most_tokens(self) -> int:
        """Tokens that the prompt and all samples have at most."""
        return len(self.tokens) + self.samples * self.max_tokens


@dataclass(frozen=True, slots=True)
class Generation:
    """One generated sample.

    Attributes:
        tokens: `[len] int32`, including the stop token, or the token in which a stop string ends.
        logprobs: `[len] float32`, natural log-probs of the softmax over the whole vocabulary at the temperature of the
            request.
        versions: `[len] int32`, version of the weights that sampled each token.
        finish_reason: why the sample ended.
        routed_experts: `[prompt_len + len - 1, moe_layers, experts_per_token]` integers, experts chosen for each token
            but the last, in any order, -1 where unknown; None if the engine does not record them.
        entropies: `[len] float32`, entropy in nats of the softmax that `logprobs` are of; None unless record.entropy.
    """

    tokens: NDArray[Any]
    logprobs: NDArray[Any]
    versions: NDArray[Any]
    finish_reason: FinishReason
    routed_experts: NDArray[Any] | None = None
    entropies: NDArray[Any] | None = None


MoreRequests: TypeAlias = Callable[[int], Sequence[GenerationRequest]]
"""Return up to this many requests that have arrived since; does not wait."""
Done: TypeAlias = list[tuple[int, list[Generation]]]
"""Finished requests: index in order of arrival, and samples."""


def no_more_requests(limit: int) -> Sequence[GenerationRequest]:
    """Return no requests; the default `MoreRequests`."""
    del limit
    return ()


class InferenceEngine(WeightConsumer, Protocol):
    """Generates with one weight version at a time; generates nothing before the first `load`."""

    @property
    def context_length(self) -> int:
        """Largest number of tokens of prompt and completion together."""

    @property
    def joins_freely(self) -> bool:
        """Whether a request that joins a running batch costs the others nothing, so that turns never wait to join."""

    @property
    def cache_tokens(self) -> int | None:
        """Tokens of requests and conversations that the key-value cache holds at once; None if it is not bounded."""

    def metrics(self) -> dict[str, float]:
        """Return counts for the metrics of the rollout actor."""

    def prepare(self, grammar: str) -> None:
        """Make a grammar ready, so that its requests do not hold up a batch. Called in any thread.

        Raises:
            RowError: the grammar cannot be compiled.
            ConfigError: the engine applies no grammars.
        """

    def stream(
        self,
        requests: Sequence[GenerationRequest],
        progress: Callable[[], None],
        refresh: Refresh | None = None,
        more: MoreRequests = no_more_requests,
    ) -> Iterator[Done]:
        """Generate the samples of all requests; yield those of a request as soon as all of them have ended.

        Between two tokens an engine also yields an empty list, so that the caller can act while requests run.

        Args:
            requests: the first requests.
            progress: called regularly, at least once for each generated token of a batch.
            refresh: called between two tokens. In-flight samples continue with the new weights: generated tokens keep
                their log-probs and versions, and the next token is sampled by the new weights given all tokens before.
                None to generate with the current weights only.
            more: called by engines that add requests to a running batch, with the number of rows that they have room
                for; turns of rows that the caller has already begun do not count.

        Raises:
            StoreError: no weights are loaded.
        """


class GenerateMixin:
    """Adds `generate`, which collects a whole `stream`, to an inference engine, and what few engines differ in."""

    @property
    def joins_freely(self) -> bool:
        """See `InferenceEngine`."""
        return False

    @property
    def cache_tokens(self) -> int | None:
        """See `InferenceEngine`."""
        return None

    def metrics(self) -> dict[str, float]:
        """See `InferenceEngine`."""
        return {}

    def prepare(self, grammar: str) -> None:
        """Refuse grammars; see `InferenceEngine`."""
        del grammar
        msg = "the inference engine of this run applies no grammars; describe the form of the answer in a message"
        raise ConfigError(msg)

    def generate(
        self: InferenceEngine,
        requests: Sequence[GenerationRequest],
        progress: Callable[[], None],
        refresh: Refresh | None = None,
    ) -> list[list[Generation]]:
        """Return the samples of each request, in order; see `InferenceEngine.stream`."""
        found = dict(pair for done in self.stream(requests, progress, refresh) for pair in done)
        return [found[i] for i in range(len(requests))]

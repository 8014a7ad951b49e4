"""Input of engines that train or score: one frozen object for each token sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.algorithms.micro_batches import Shared, micro_batches
from relax_actors.engines.protocols.media import PromptMedia, media_of

Array = NDArray[Any]
PER_TOKEN = (
    *("logprobs", "versions", "advantages", "returns", "values", "proximal_logprobs", "reference_logprobs"),
    *("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"),
)


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One token sequence of a sample; arrays are `[len]` unless noted.

    Only tokens where `loss_mask` is true are scored, counted and enter the loss; per-token arrays are ignored at other
    positions.

    Attributes:
        token_ids: int32, the prompt and everything after it.
        loss_mask: bool, true for tokens to train; false at position 0, which has no token before it.
        logprobs: float32, natural log-probs that the tokens were sampled with.
        versions: int32, version of the weights that sampled each token; -1 for tokens that no policy sampled.
        advantages: float32.
        returns: float32, targets of a critic.
        values: float32, column `values` of the critic: expected return of the state before each token.
        proximal_logprobs: float32, column `actor_fwd`, with algorithm.proximal = "actor_fwd".
        reference_logprobs: float32, column `reference`, if a role writes it.
        teacher_logprobs: float32, column `teacher`, with algorithm.distil.place = "loss".
        teacher_top_ids: `[len, k] int32`, the teacher's most likely tokens at each token, with algorithm.distil.top_k.
        teacher_top_logprobs: `[len, k] float32`, their log-probs.
        routed_experts: `[len - 1, moe_layers, experts_per_token] int16`, experts to compute with for each token but the
            last, -1 for the router's own choice; None if all choices are the router's.
        media: media and positions of the prompt that `token_ids` begins with; None for a model that reads text only.
        row: index of the row in the step.
        sample: index of the sample in its row; sequences of one sample share it.
        sample_tokens: trained tokens of the whole sample, over all of its sequences; 0 if this is its only sequence.

    Raises:
        ValueError: arrays differ in length, or `loss_mask` is true for the first token.
    """

    token_ids: Array
    loss_mask: Array
    logprobs: Array | None = None
    versions: Array | None = None
    advantages: Array | None = None
    returns: Array | None = None
    values: Array | None = None
    proximal_logprobs: Array | None = None
    reference_logprobs: Array | None = None
    teacher_logprobs: Array | None = None
    teacher_top_ids: Array | None = None
    teacher_top_logprobs: Array | None = None
    routed_experts: Array | None = None
    media: PromptMedia | None = None
    row: int = 0
    sample: int = 0
    sample_tokens: int = 0

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("loss_mask", *PER_TOKEN):
            array = getattr(self, name)
            if array is not None and (array.shape[:1] != (length,) or array.ndim != 1 + name.startswith("teacher_top")):
                msg = f"{name} of a sequence has shape {list(array.shape)}; it has {length} tokens"
                raise ValueError(msg)
        if length and self.loss_mask[0]:
            msg = "loss_mask is true for the first token of a sequence, which has no token before it"
            raise ValueError(msg)

    @classmethod
    def of_completion(cls, prompt: Array, completion: Array, **fields: Any) -> TrainSample:
        """Build the sequence of a prompt and a completion; all tokens of the completion are trained.

        Args:
            prompt: `[prompt_len] int32`.
            completion: `[len] int32`.
            fields: other attributes; per-token arrays are given for the completion, `[len]`.
        """
        before = len(prompt)
        mask = np.arange(before + len(completion)) >= before
        padded: dict[str, Any] = {
            name: np.concatenate([np.zeros((before, *value.shape[1:]), value.dtype), value])
            if name in PER_TOKEN and value is not None
            else value
            for name, value in fields.items()
        }
        return cls(np.concatenate([prompt, completion]).astype(np.int32), mask, **padded)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def share(self) -> float:
        """Trained tokens of the sequence divided by those of its sample."""
        return self.trained / self.sample_tokens if self.sample_tokens else 1.0

    def masked(self, name: str) -> Array:
        """Return the values of a per-token array where `loss_mask` is true, `[trained]` or `[trained, k]`.

        Raises:
            ValueError: the array is None.
        """
        array = getattr(self, name)
        if array is None:
            msg = f"a sequence has no {name}, which the algorithm reads; add the role that writes them"
            raise ValueError(msg)
        found: Array = array[self.loss_mask]
        return found

    def with_advantages(self, advantages: Array) -> TrainSample:
        """Return a copy with other advantages, `[len] float32`."""
        return replace(self, advantages=advantages)


def lengths_of(samples: Iterable[TrainSample]) -> list[int]:
    """Return the number of tokens of each sequence."""
    return [len(sample) for sample in samples]


def micro_batches_of(samples: Sequence[TrainSample], max_tokens: int) -> list[list[int]]:
    """Split sequences into micro-batches; see `micro_batches`.

    The media of a prompt count as many tokens again as they have placeholders, once for all of its sequences in a
    micro-batch: their towers compute about as much as the decoder does for these tokens.

    Returns:
        Indices into `samples`, one list for each micro-batch.
    """
    return micro_batches(lengths_of(samples), max_tokens=max_tokens, shared=shared_media(samples))


def shared_media(samples: Sequence[TrainSample]) -> Shared | None:
    """Return the work of the towers, which sequences of the same prompt share; None without media."""
    media = media_of(sample.media for sample in samples)
    if not media:
        return None
    number = {id(one): i for i, one in enumerate(media)}
    # Sequences without media share nothing: each is a group of its own.
    groups = [number.get(id(sample.media), len(media) + i) for i, sample in enumerate(samples)]
    return Shared(groups, {i: one.tokens for i, one in enumerate(media)})


def by_row(samples: Sequence[TrainSample]) -> Iterator[list[TrainSample]]:
    """Group consecutive sequences of the same row."""
    for _, group in groupby(samples, key=lambda sample: sample.row):
        yield list(group)

"""Input of engines that train or score: one frozen object for each token sequence, with everything it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
PER_TOKEN = ("logprobs", "versions", "advantages", "returns", "proximal_logprobs", "reference_logprobs")


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One token sequence of a sample; all arrays are `[len]` unless noted.

    Only tokens where `loss_mask` is true are scored, enter losses and are counted; other positions of the per-token
    arrays are ignored.

    Attributes:
        token_ids: int32, prompt and all that follows.
        loss_mask: bool, tokens to train; position 0 has no token before it and is always false.
        logprobs: float32, natural log-probs that the tokens were sampled with.
        versions: int32, versions of the weights that sampled the tokens, -1 where none did.
        advantages: float32.
        returns: float32, targets of a critic.
        proximal_logprobs: float32, of column `actor_fwd`, if algorithm.proximal asks for it.
        reference_logprobs: float32, of column `reference`, where actors compute it.
        routed_experts: `[len - 1, moe_layers, experts_per_token] int16`, experts to compute with for each token but the
            last, -1 for the router's own choice; None to leave all choices to the router.
        row: which row of the step the sequence belongs to.
        sample_tokens: trained tokens of the whole sample, over all of its sequences; 0 stands for this sequence's own.

    Raises:
        ValueError: arrays differ in length, or the first token is to be trained.
    """

    token_ids: Array
    loss_mask: Array
    logprobs: Array | None = None
    versions: Array | None = None
    advantages: Array | None = None
    returns: Array | None = None
    proximal_logprobs: Array | None = None
    reference_logprobs: Array | None = None
    routed_experts: Array | None = None
    row: int = 0
    sample_tokens: int = 0

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("loss_mask", *PER_TOKEN):
            array = getattr(self, name)
            if array is not None and array.shape != (length,):
                msg = f"{name} of a sequence has shape {list(array.shape)}; it has {length} tokens"
                raise ValueError(msg)
        if length and self.loss_mask[0]:
            msg = "loss_mask is true for the first token of a sequence, which has no token before it"
            raise ValueError(msg)

    @classmethod
    def of_completion(cls, prompt: Array, completion: Array, **fields: Any) -> TrainSample:
        """Build the sequence of a prompt whose completion is trained.

        Args:
            prompt: `[prompt_len] int32`.
            completion: `[len] int32`.
            fields: further attributes; per-token arrays are those of the completion, `[len]`.
        """
        before = len(prompt)
        mask = np.arange(before + len(completion)) >= before
        padded = {
            name: np.concatenate([np.zeros(before, value.dtype), value])
            if name in PER_TOKEN and value is not None
            else value
            for name, value in fields.items()
        }
        return cls(np.concatenate([prompt, completion]).astype(np.int32), mask, **padded)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def trained(self) -> int:
        """Trained tokens."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def share(self) -> float:
        """Trained tokens of the sequence as a share of those of its sample."""
        return self.trained / self.sample_tokens if self.sample_tokens else 1.0

    def masked(self, name: str) -> Array:
        """A per-token array where `loss_mask` is true, `[trained]`.

        Raises:
            ValueError: the sequence has no such array.
        """
        array = getattr(self, name)
        if array is None:
            msg = f"a sequence has no {name}, which the algorithm reads; add the column that holds them"
            raise ValueError(msg)
        found: Array = array[self.loss_mask]
        return found

    def with_advantages(self, advantages: Array) -> TrainSample:
        """Copy with other advantages, `[len] float32`."""
        return replace(self, advantages=advantages)


def lengths_of(samples: Iterable[TrainSample]) -> list[int]:
    """Tokens of each sequence."""
    return [len(sample) for sample in samples]


def by_row(samples: Sequence[TrainSample]) -> Iterator[list[TrainSample]]:
    """Neighbouring sequences of one row together."""
    for _, group in groupby(samples, key=lambda sample: sample.row):
        yield list(group)

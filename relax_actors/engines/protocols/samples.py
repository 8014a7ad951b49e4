"""Input of engines that train or score: one frozen object for each token sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.algorithms.micro_batches import Shared, micro_batches
from relax_actors.algorithms.shared_prefixes import find_shared_prefixes
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.messages.experts import MISSING

Array = NDArray[Any]
_TOP = ("teacher_top_ids", "teacher_top_logprobs")
PER_TOKEN = (
    *("logprobs", "versions", "advantages", "returns", "values", "targets"),
    *("proximal_logprobs", "reference_logprobs"),
    *("teacher_logprobs", *_TOP, "imitated", "observed"),
)
_CHECKED = ("loss_mask", *PER_TOKEN)


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
        targets: float32, what scores are compared with: the class of a label, or the margin of a pair. A model is read
            at each trained token of a sequence with targets, and before each of one without.
        proximal_logprobs: float32, column `actor_fwd`, with algorithm.proximal = "actor_fwd".
        reference_logprobs: float32, column `reference`, if a role writes it.
        teacher_logprobs: float32, column `teacher`, with algorithm.distil.place = "loss".
        teacher_top_ids: `[len, k] int32`, the teacher's most likely tokens at each token, with algorithm.distil.top_k.
        teacher_top_logprobs: `[len, k] float32`, their log-probs.
        imitated: float32, factor of -log-prob in the sum of the losses, with algorithm.positive_nll or
            algorithm.observation_nll.
        observed: bool, tokens of observations, with algorithm.observation_nll. `loss_mask` is true for them, too, but
            only the term of `imitated` trains them: they are no tokens of the policy, and are in no count or mean.
        routed_experts: `[len - 1, moe_layers, experts_per_token] int16`, experts to compute with for each token but the
            last, -1 for the router's own choice; None if all choices are the router's.
        media: media and positions of the prompt that `token_ids` begins with; None for a model that reads text only.
        row: index of the row in the step.
        sample: index of the sample in its row; sequences of one sample share it.
        sample_tokens: trained tokens of the whole sample, over all of its sequences; 0 if this is its only sequence.
        row_tokens: trained tokens of all samples of the row; 0 if this is its only sequence.

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
    targets: Array | None = None
    proximal_logprobs: Array | None = None
    reference_logprobs: Array | None = None
    teacher_logprobs: Array | None = None
    teacher_top_ids: Array | None = None
    teacher_top_logprobs: Array | None = None
    imitated: Array | None = None
    observed: Array | None = None
    routed_experts: Array | None = None
    media: PromptMedia | None = None
    row: int = 0
    sample: int = 0
    sample_tokens: int = 0
    row_tokens: int = 0

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in _CHECKED:
            array = getattr(self, name)
            if array is not None and (array.ndim != (2 if name in _TOP else 1) or len(array) != length):
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
    def inputs(self) -> int:
        """Leading tokens that a model reads: those up to the last place where it is read, and the media of a prompt."""
        trained = np.flatnonzero(self.loss_mask)
        placed = 0 if self.media is None else self.media.positions.shape[1]
        return max(int(trained[-1]) + 1 - self.lag if len(trained) else 1, placed)

    @property
    def lag(self) -> int:
        """Tokens between a trained token and the place where the model is read for it, 1 or 0."""
        return int(self.targets is None)

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def share(self) -> float:
        """Trained tokens of the sequence divided by those of its sample."""
        return self.trained / self.sample_tokens if self.sample_tokens else 1.0

    def masked(self, name: str) -> Array:
        """Return a per-token array where `loss_mask` is true, `[trained]` or `[trained, k]`; raises ValueError."""
        array = getattr(self, name)
        if array is None:
            msg = f"a sequence has no {name}, which the algorithm reads; add the role that writes them"
            raise ValueError(msg)
        values: Array = array[self.loss_mask]
        return values

    def with_advantages(self, advantages: Array) -> TrainSample:
        """Return a copy with other advantages, `[len] float32`."""
        return replace(self, advantages=advantages)


def input_lengths(samples: Iterable[TrainSample]) -> list[int]:
    """Return the number of tokens of each sequence that a model reads; an empty sequence has none."""
    return [sample.inputs if len(sample) else 0 for sample in samples]


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Sequences of a micro-batch.

    Attributes:
        indices: index of each sequence in the step.
        shared: leading tokens that each shares with its predecessor in `indices`, and that are computed once.
    """

    indices: list[int]
    shared: list[int]

    @classmethod
    def of(cls, indices: Iterable[int], shared: Shared | None = None) -> MicroBatchPlan:
        """Plan a micro-batch of sequences, in the order of `micro_batches` if they share work."""
        own = list(indices)
        return cls(own, [0] * len(own) if shared is None else [0, *(shared.prefixes[i] for i in own[1:])])


def plan_micro_batches(
    samples: Sequence[TrainSample], max_tokens: int, *, share_prefixes: bool, alone: bool = False
) -> list[MicroBatchPlan]:
    """Split sequences into micro-batches, or with `alone` into one for each sequence; see `micro_batches`.

    Tokens behind the last place where a model is read are no inputs and do not count. A prefix that sequences share
    counts once in a micro-batch. The media of a prompt count as many tokens again as they have placeholders, once for
    all sequences that read them: their towers compute about as much as the decoder does for these tokens.
    """
    shared = shared_work(samples, share_prefixes=share_prefixes)
    parts = micro_batches(input_lengths(samples), max_tokens=max_tokens, shared=shared)
    if alone:
        return [MicroBatchPlan.of([i]) for part in parts for i in part]
    return [MicroBatchPlan.of(part, shared) for part in parts]


def shared_work(samples: Sequence[TrainSample], *, share_prefixes: bool) -> Shared | None:
    """Return the prefixes and media that sequences of the same row share; None if they share nothing."""
    number: dict[int, int] = {}
    media = [_placeholders(sample, number) for sample in samples]
    ranks, prefixes, groups = list(range(len(samples))), [0] * len(samples), list(range(len(samples)))
    for row in _rows(samples):
        order = sorted(row, key=lambda i: (-samples[i].inputs, i))
        if share_prefixes and len(row) > 1:
            order = _share_prefixes(samples, row, number, prefixes)
        of_medium: dict[int, int] = {}
        for before, i in zip([order[0], *order], order, strict=False):
            if prefixes[i]:
                groups[i] = groups[before]
            else:
                groups[i] = next((of_medium[medium] for medium in media[i] if medium in of_medium), i)
            of_medium |= dict.fromkeys(media[i], groups[i])
        for rank, i in enumerate(order):
            ranks[i] = rank
    if not any(media) and not any(prefixes):
        return None
    return Shared(groups, ranks, prefixes, [sample.trained for sample in samples], media)


def _rows(samples: Sequence[TrainSample]) -> list[list[int]]:
    """Return the indices of the sequences of each row."""
    rows: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        rows.setdefault(sample.row, []).append(index)
    return list(rows.values())


def _placeholders(sample: TrainSample, number: dict[int, int]) -> dict[int, int]:
    """Return the placeholders of the media of a sequence by the number of the medium, from 1; adds to `number`."""
    items = () if sample.media is None else sample.media.items
    return {number.setdefault(id(item), len(number) + 1): item.tokens for item in items}


def _share_prefixes(
    samples: Sequence[TrainSample], row: Sequence[int], number: Mapping[int, int], prefixes: list[int]
) -> list[int]:
    """Order the sequences of a row by their prefixes, and set what each shares with its predecessor."""
    members = [samples[i] for i in row]
    columns = [[np.ascontiguousarray(sample.token_ids[: sample.inputs], np.int32)] for sample in members]
    if shape := next((e.shape[1:] for sample in members if (e := sample.routed_experts) is not None), None):
        for sample, own in zip(members, columns, strict=True):
            own.append(_experts(sample, shape))
    if any(sample.media is not None for sample in members):
        for sample, own in zip(members, columns, strict=True):
            own.extend(_positions(sample, number))
    order, shared = find_shared_prefixes([c[0] if len(c) == 1 else np.column_stack(c) for c in columns])
    for i, length in zip(row, shared, strict=True):
        prefixes[i] = length
    return [row[position] for position in order]


def _experts(sample: TrainSample, shape: tuple[int, ...]) -> Array:
    """Return the recorded experts of each token, `[inputs, layers * experts_per_token] int32`, -1 where none are."""
    padded = np.full((sample.inputs, *shape), MISSING, np.int32)
    if sample.routed_experts is not None:
        known = sample.routed_experts[: sample.inputs]
        padded[: len(known)] = known
    return padded.reshape(sample.inputs, -1)


def _positions(sample: TrainSample, number: Mapping[int, int]) -> tuple[Array, Array]:
    """Return the bits of the rotary positions, `[inputs, 3] int32`, and the numbers of media where they begin."""
    begins, length = np.zeros(sample.inputs, np.int32), sample.inputs
    if sample.media is None:
        positions: Array = np.broadcast_to(np.arange(length), (3, length))
    else:
        positions = sample.media.positions_of(length)
        for item in sample.media.items:
            begins[item.start : item.start + 1] = number[id(item)]
    return np.ascontiguousarray(positions.T, np.float32).view(np.int32), begins


def by_row(samples: Sequence[TrainSample]) -> Iterator[list[TrainSample]]:
    """Group consecutive sequences of the same row."""
    for _, group in groupby(samples, key=lambda sample: sample.row):
        yield list(group)

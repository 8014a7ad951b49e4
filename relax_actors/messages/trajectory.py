"""Column `trajectory`: the samples of a prompt, each with one or more token sequences.

The encoding is flat: the prompt once, then the tokens of all sequences, concatenated. `Trajectory.samples` returns the
same data as objects, and `Trajectory.of` builds a trajectory from objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages.experts import expand, join_experts
from relax_actors.messages.flat_samples import flatten_samples
from relax_actors.messages.media import ObservedMedia
from relax_actors.messages.samples import (
    NOT_SAMPLED,
    FinishReason,
    Sample,
    TokenSequence,
    runs,
    sampling_versions,
    unpack_conversations,
)
from relax_actors.messages.trajectory_checks import check_trajectory

Array = NDArray[Any]
LABEL = "label"
"""Metric of the samples of a labelled row from the data: 1 for a good answer, -1 for a bad one, 0 for another one."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Column `trajectory`: the n samples of a prompt.

    A sequence starts with prompt tokens, which are stored once, and continues with its own tokens. In shapes,
    `sequences` is the number of sequences of all samples and `total` the number of their own tokens.

    Attributes:
        prompt_tokens: `[prompt_len] int32`.
        lengths: `[sequences] int32`, number of own tokens of each sequence.
        token_ids: `[total] int32`, own tokens of all sequences, concatenated.
        logprobs: `[total] float32`, natural log-probs of the softmax at the sampling temperature (top-p does not
            change them); 0 where no policy sampled the token.
        versions: `[total] int32`, version of the weights that sampled each token; -1 where no policy sampled it.
        texts: `[n]`, decoded text that the model wrote in each sample.
        finish_reasons: `[n]`, see `FinishReason`.
        fingerprints: fingerprint of the weights of each version in `versions`, in ascending order of the versions; an
            empty string where it is not known. Empty if none is known.
        loss_mask: `[total] bool`, true for trained tokens; None if all own tokens are trained.
        sequence_counts: `[n] int32`, number of sequences of each sample; None if each has one.
        shared_lengths: `[sequences] int32`, number of leading prompt tokens of each sequence; None if each has
            all of them.
        spans: `[spans, 2] int32`, begin and end of each generation among the `total` tokens; None if each run of
            sampled tokens is one generation.
        metrics: name -> `[n]`, measurements of the samples.
        turn_rewards: `[spans] float32`, reward of each generation, in the order of `turn_spans`; None if turns have no
            rewards.
        conversations: `[bytes] uint8`, messages of the samples of an episode, see `pack_conversations`; None if the
            samples are completions.
        players: `[sequences]`, player of an episode whose conversation each sequence is; empty without players.
        greedy_samples: how many of the samples, the last ones, are greedy baselines of the others; none of their
            tokens are trained.
        prompt_experts: `[1 or sequences, prompt_len - 1, moe_layers, experts_per_token]` uint8 or int16 as
            `messages.experts.compact` gives them, for the prompt's tokens but the last; only with
            trainer.router_replay.
        routed_experts: `[total, moe_layers, experts_per_token]`, for the token before each own token, from the forward
            pass that produced the own token.
        observed: media that each sequence reads after its prompt, see `TokenSequence.observed`; empty if none does.
        targets: `[total] float32`, of a row of the data for a reward model: at each trained token the class of its
            label, or the margin of its pair; None in other runs.
        entropies: `[total] float32`, entropy in nats of the softmax that `logprobs` are of; 0 where no policy sampled
            the token. None unless record.entropy.

    Raises:
        ValueError: shapes or values are inconsistent, or no token is trained.
    """

    prompt_tokens: Array
    lengths: Array
    token_ids: Array
    logprobs: Array
    versions: Array
    texts: list[str]
    finish_reasons: list[str]
    fingerprints: list[str] = field(default_factory=list)
    loss_mask: Array | None = None
    sequence_counts: Array | None = None
    shared_lengths: Array | None = None
    spans: Array | None = None
    metrics: dict[str, list[float]] = field(default_factory=dict)
    turn_rewards: Array | None = None
    conversations: Array | None = None
    players: list[str] = field(default_factory=list)
    greedy_samples: int = 0
    prompt_experts: Array | None = None
    routed_experts: Array | None = None
    observed: list[list[ObservedMedia]] = field(default_factory=list)
    targets: Array | None = None
    entropies: Array | None = None

    def __post_init__(self) -> None:
        check_trajectory(self)

    @classmethod
    def of(
        cls, prompt_tokens: Array, samples: Sequence[Sample], fingerprints: Mapping[int, str] | None = None
    ) -> Trajectory:
        """Build the trajectory of a prompt from its samples; leading prompt tokens are stored once.

        Args:
            prompt_tokens: `[prompt_len] int32`.
            samples: the n samples.
            fingerprints: fingerprints of weights by version; None if none is known.

        Raises:
            ValueError: a sample has no sequence, samples have different metrics, or a check of `Trajectory` fails.
        """
        return cls(**flatten_samples(prompt_tokens, samples, fingerprints or {}))

    @property
    def trained(self) -> Array:
        """True for trained tokens, `[total] bool`."""
        return np.ones(len(self.token_ids), np.bool_) if self.loss_mask is None else self.loss_mask

    @property
    def trained_lengths(self) -> Array:
        """Number of trained tokens of each sample, `[n] int64`."""
        if self.loss_mask is None:
            return self.sample_lengths
        so_far = np.concatenate([[0], np.cumsum(self.trained)])
        ends = np.concatenate([[0], np.cumsum(self.sample_lengths)])
        lengths: Array = np.diff(so_far[ends])
        return lengths

    @property
    def shared(self) -> Array:
        """Number of leading prompt tokens of each sequence, `[sequences] int32`."""
        if self.shared_lengths is not None:
            return self.shared_lengths
        return np.full(len(self.lengths), len(self.prompt_tokens), np.int32)

    @property
    def counts(self) -> Array:
        """Number of sequences of each sample, `[n] int32`."""
        return np.ones(len(self.texts), np.int32) if self.sequence_counts is None else self.sequence_counts

    @property
    def sample_lengths(self) -> Array:
        """Number of own tokens of each sample, `[n] int64`."""
        if self.sequence_counts is None:
            return self.lengths.astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        bounds = np.concatenate([[0], np.cumsum(self.sequence_counts, dtype=np.int64)])
        lengths: Array = np.diff(ends[bounds])
        return lengths

    @property
    def sequence_lengths(self) -> list[int]:
        """Number of tokens of each sequence, including prompt tokens."""
        lengths: list[int] = (self.lengths.astype(np.int64) + self.shared).tolist()
        return lengths

    @property
    def turn_spans(self) -> Array:
        """Begin and end of each generation among the `total` tokens, `[spans, 2] int32`."""
        if self.spans is not None:
            return self.spans
        spans: Array
        ends = np.cumsum(self.lengths, dtype=np.int64).tolist()
        parts = [runs(self.versions[end - n : end] >= 0) + end - n for end, n in zip(ends, self.lengths, strict=True)]
        spans = np.concatenate(parts).astype(np.int32)
        return spans

    @property
    def turn_counts(self) -> Array:
        """Number of generations of each sample, `[n] int64`."""
        bounds = np.concatenate([[0], np.cumsum(self.sample_lengths)])
        counts: Array = np.diff(np.searchsorted(self.turn_spans[:, 0], bounds))
        return counts

    @property
    def turn_numbers(self) -> Array:
        """Number of each token's turn in its sample, `[total] int64`; observations count back."""
        begins = np.zeros(len(self.token_ids) + 1, np.int64)
        begins[self.turn_spans[:, 0]] = 1
        before = np.concatenate([[0], np.cumsum(begins)])
        first = np.cumsum(self.sample_lengths) - self.sample_lengths
        numbers: Array = before[1:-1] - np.repeat(before[first], self.sample_lengths) - 1
        return np.maximum(numbers, 0)

    @property
    def branch_numbers(self) -> Array:
        """Number of each token's sequence in its sample, `[total] int64`."""
        counts = self.counts
        numbers = np.arange(len(self.lengths)) - np.repeat(np.cumsum(counts) - counts, counts)
        branches: Array = np.repeat(numbers, self.lengths)
        return branches

    @property
    def is_sampled(self) -> bool:
        """Whether a policy sampled tokens; none did of an example from the data."""
        return bool((self.versions >= 0).any())

    def staleness(self, step: int) -> int:
        """Steps from the oldest version of a trained token to `step`; 0 for an example."""
        return step - int(self.versions[self.trained].min()) if self.is_sampled else 0

    @property
    def fingerprint_by_version(self) -> dict[int, str]:
        """Known fingerprints of the weights that sampled tokens, by version."""
        named = zip(sampling_versions(self.versions), self.fingerprints, strict=True) if self.fingerprints else ()
        return {version: fingerprint for version, fingerprint in named if fingerprint}

    def iter_tokens(self) -> Iterator[Array]:
        """Yield the token ids `[len]` of each sequence, with its part of the prompt."""
        ends = np.cumsum(self.lengths, dtype=np.int64).tolist()
        for end, own, shared in zip(ends, self.lengths.tolist(), self.shared.tolist(), strict=True):
            yield np.concatenate([self.prompt_tokens[:shared], self.token_ids[end - own : end]])

    @property
    def sequences(self) -> list[TokenSequence]:
        """The sequences of all samples, in order."""
        return list(self.iter_sequences())

    @property
    def samples(self) -> list[Sample]:
        """The samples, in order."""
        sequences, samples, turns = self.iter_sequences(), [], [0]
        said = None if self.conversations is None else unpack_conversations(self.conversations, len(self.texts))
        if self.turn_rewards is not None:
            turns = np.cumsum([0, *self.turn_counts]).tolist()
        for i, count in enumerate(self.counts.tolist()):
            metrics = {name: values[i] for name, values in self.metrics.items()}
            own = tuple(next(sequences) for _ in range(count))
            rewards = None if self.turn_rewards is None else self.turn_rewards[turns[i] : turns[i + 1]]
            reason, messages = FinishReason(self.finish_reasons[i]), [] if said is None else said[i]
            samples.append(Sample(own, self.texts[i], reason, metrics, rewards, messages))
        return samples

    def iter_sequences(self, *, spans: bool = True, experts: bool = True) -> Iterator[TokenSequence]:
        """Yield the sequences of all samples, in order.

        Args:
            spans: restore `TokenSequence.spans`.
            experts: restore `TokenSequence.routed_experts` where they were recorded.
        """
        trained, recorded = self.trained, self.expanded_experts() if experts else None
        begins = None if self.spans is None else self.spans[:, 0]
        ends = np.cumsum(self.lengths, dtype=np.int64).tolist()
        for i, (end, own, shared) in enumerate(zip(ends, self.lengths.tolist(), self.shared.tolist(), strict=True)):
            begin = end - own
            part = slice(begin, end)
            inside = None
            if spans and self.spans is not None and begins is not None:
                first, last = np.searchsorted(begins, (begin, end)).tolist()
                inside = self.spans[first:last] - begin + shared
            elif spans:
                inside = runs(self.versions[part] >= 0) + shared
            yield TokenSequence(
                np.concatenate([self.prompt_tokens[:shared], self.token_ids[part]]),
                np.concatenate([np.zeros(shared, np.bool_), trained[part]]),
                np.concatenate([np.zeros(shared, np.float32), self.logprobs[part]]),
                np.concatenate([np.full(shared, NOT_SAMPLED, np.int32), self.versions[part]]),
                inside,
                None if recorded is None else join_experts(recorded, i, shared, part),
                self.players[i] if self.players else "",
                tuple(self.observed[i]) if self.observed else (),
                None
                if self.entropies is None
                else np.concatenate([np.zeros(shared, np.float32), self.entropies[part]]),
            )

    def expanded_experts(self) -> tuple[Array, Array] | None:
        """Experts of prompt and own tokens for `join_experts`; None if not recorded."""
        if self.prompt_experts is None or self.routed_experts is None:
            return None
        return expand(self.prompt_experts), expand(self.routed_experts)

"""Flat arrays of samples, as the column `trajectory` stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages.experts import MISSING, store_experts
from relax_actors.messages.samples import Sample, TokenSequence, fingerprints_of, pack_conversations, runs

Array = NDArray[Any]


def flatten_samples(prompt_tokens: Array, samples: Sequence[Sample], fingerprints: Mapping[int, str]) -> dict[str, Any]:
    """Return the fields of the `Trajectory` of samples; see `Trajectory.of`."""
    if not samples:
        msg = "a trajectory has no samples; give the row at least one"
        raise ValueError(msg)
    if empty := [i for i, sample in enumerate(samples) if not sample.sequences]:
        msg = f"sample {empty[0]} has no sequence; give each sample at least one"
        raise ValueError(msg)
    sequences = [sequence for sample in samples for sequence in sample.sequences]
    if shape := next((s.routed_experts.shape[1:] for s in sequences if s.routed_experts is not None), None):
        sequences = [_with_unknown_experts(sequence, shape) for sequence in sequences]
    with_experts = [sequence.routed_experts is not None for sequence in sequences]
    if any(with_experts) and not all(with_experts):
        msg = (
            f"sequence {with_experts.index(False)} has no routed_experts, other sequences have; record them for "
            "all or for none"
        )
        raise ValueError(msg)
    shared = [_count_shared(prompt_tokens, sequence) for sequence in sequences]
    own = list(zip(sequences, shared, strict=True))
    masked = any(s.loss_mask[:k].any() or not s.loss_mask[k:].all() for s, k in own)
    names = sorted({name for sample in samples for name in sample.metrics})
    for i, sample in enumerate(samples):
        if lacking := [name for name in names if name not in sample.metrics]:
            msg = f"sample {i} has no metric {lacking[0]!r}; give all samples of a row the same metrics"
            raise ValueError(msg)
    experts = store_experts([(s.routed_experts, k) for s, k in own], len(prompt_tokens))
    versions = _int32(np.concatenate([s.versions[k:] for s, k in own]), "versions")
    return {
        "prompt_tokens": _int32(np.asarray(prompt_tokens), "prompt_tokens"),
        "lengths": np.array([len(s.token_ids) - k for s, k in own], np.int32),
        "token_ids": _int32(np.concatenate([s.token_ids[k:] for s, k in own]), "token_ids"),
        "logprobs": np.concatenate([s.logprobs[k:] for s, k in own]).astype(np.float32),
        "versions": versions,
        "texts": [sample.text for sample in samples],
        "finish_reasons": [str(sample.finish_reason) for sample in samples],
        "fingerprints": fingerprints_of(versions, fingerprints),
        "loss_mask": np.concatenate([s.loss_mask[k:] for s, k in own]).astype(np.bool_) if masked else None,
        "sequence_counts": _none_if_all(1, [len(sample.sequences) for sample in samples]),
        "shared_lengths": _none_if_all(len(prompt_tokens), shared),
        "spans": _stored_spans(own),
        "metrics": {name: [float(sample.metrics[name]) for sample in samples] for name in names},
        "turn_rewards": _turn_rewards(samples),
        "conversations": pack_conversations([s.messages for s in samples])
        if any(s.messages for s in samples)
        else None,
        "players": [s.player for s in sequences] if any(s.player for s in sequences) else [],
        "prompt_experts": experts[0],
        "routed_experts": experts[1],
        "entropies": _entropies(own),
        "observed": [list(s.observed) for s in sequences] if any(s.observed for s in sequences) else [],
    }


def _with_unknown_experts(sequence: TokenSequence, shape: tuple[int, ...]) -> TokenSequence:
    """Return a sequence that no policy has read or written with experts that are not known."""
    if sequence.routed_experts is not None or sequence.sampled.any():
        return sequence
    unknown = np.full((max(0, len(sequence.token_ids) - 1), *shape), MISSING, np.int16)
    return replace(sequence, routed_experts=unknown)


def _count_shared(prompt: Array, sequence: TokenSequence) -> int:
    """Count the leading tokens of a sequence that equal the prompt and were not sampled."""
    sampled = np.flatnonzero(sequence.sampled)
    limit = min(len(prompt), int(sampled[0]) if len(sampled) else len(sequence.token_ids))
    differences = np.flatnonzero(np.asarray(prompt[:limit]) != sequence.token_ids[:limit])
    return int(differences[0]) if len(differences) else limit


def _entropies(own: Sequence[tuple[TokenSequence, int]]) -> Array | None:
    """Concatenate the entropies of own tokens; None unless all are known."""
    known = [s.entropies is not None for s, _ in own if s.sampled.any()]
    if not known or not all(known):
        return None
    parts = [np.zeros(len(s.token_ids), np.float32) if s.entropies is None else s.entropies for s, _ in own]
    return np.concatenate([part[k:] for part, (_, k) in zip(parts, own, strict=True)]).astype(np.float32)


def _turn_rewards(samples: Sequence[Sample]) -> Array | None:
    """Concatenate the rewards of turns; None unless all samples have them."""
    given = [sample.turn_rewards for sample in samples if sample.turn_rewards is not None]
    return np.concatenate(given).astype(np.float32) if len(given) == len(samples) else None


def _int32(array: Array, name: str) -> Array:
    """Convert integers to int32; raises ValueError if that changes them."""
    bounds = np.iinfo(np.int32)
    if array.dtype.kind not in "iu" or (len(array) and (array.min() < bounds.min or array.max() > bounds.max)):
        msg = f"{name} are {array.dtype}; give integers that fit in int32"
        raise ValueError(msg)
    return array.astype(np.int32)


def _none_if_all(default: int, values: Sequence[int]) -> Array | None:
    """Return None if all values are the default, which needs no field, else an int32 array."""
    return None if all(value == default for value in values) else np.array(values, np.int32)


def _stored_spans(own: Sequence[tuple[TokenSequence, int]]) -> Array | None:
    """Compute the spans among all own tokens; None if they equal the runs of sampled tokens."""
    spans, is_default, offset = [], True, 0
    for sequence, shared in own:
        implied = runs(sequence.sampled[shared:]) + offset
        given = implied if sequence.spans is None else sequence.spans - shared + offset
        is_default = is_default and np.array_equal(given, implied)
        spans.append(given)
        offset += len(sequence.token_ids) - shared
    return None if is_default else np.concatenate(spans).astype(np.int32)

"""What a trajectory must be: shapes, types and values that fit each other."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import numpy as np

from relax_actors.messages.experts import check_experts
from relax_actors.messages.samples import PLAYER_NAME, FinishReason, sampling_versions

Flat: TypeAlias = Any
"""A `Trajectory`, whose module imports this one."""
MAX_SEQUENCES = 1 << 16
MAX_TOKENS = 1 << 26
"""Most sequences of a row, and most tokens of all of them, counting the prompt once for each."""
_FINISH_REASONS = frozenset(map(str, FinishReason))
_METRIC_NAME = re.compile(r"[\w./-]{1,64}", re.ASCII)


def check_trajectory(flat: Flat) -> None:
    """Check a trajectory whose fields have their declared kinds.

    Raises:
        ValueError: shapes or values are inconsistent, or no token is trained.
    """
    _types(flat)
    _size(flat)
    _samples(flat)
    _tokens(flat)
    _fingerprints(flat)
    _spans(flat)
    _entropies(flat)
    _turns(flat)
    _players(flat)
    _observed(flat)
    sizes = len(flat.prompt_tokens), len(flat.lengths), len(flat.token_ids)
    check_experts(flat.prompt_experts, flat.routed_experts, sizes)


def _types(flat: Flat) -> None:
    for name in ("prompt_tokens", "token_ids", "versions"):
        array = getattr(flat, name)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            msg = f"{name} of a trajectory is {array.dtype}{list(array.shape)}, not one-dimensional integers"
            raise ValueError(msg)
    # Sums of int32 fit in int64, so that no layout can wrap around and pass the checks below.
    for name in ("lengths", "sequence_counts", "shared_lengths"):
        array = getattr(flat, name)
        if array is not None and (array.ndim != 1 or array.dtype != np.int32):
            msg = f"{name} of a trajectory is {array.dtype}{list(array.shape)}, not one-dimensional int32"
            raise ValueError(msg)
    if flat.logprobs.ndim != 1 or flat.logprobs.dtype.kind != "f":
        msg = f"logprobs of a trajectory are {flat.logprobs.dtype}{list(flat.logprobs.shape)}, not [total] floats"
        raise ValueError(msg)
    if flat.loss_mask is not None and (flat.loss_mask.ndim != 1 or flat.loss_mask.dtype != np.bool_):
        msg = f"loss_mask of a trajectory is {flat.loss_mask.dtype}{list(flat.loss_mask.shape)}, not [total] bool"
        raise ValueError(msg)


def _size(flat: Flat) -> None:
    """Check the size of sequences: each repeats the prompt, so small cells can be large."""
    if len(flat.lengths) > MAX_SEQUENCES:
        msg = f"a trajectory has {len(flat.lengths)} sequences, more than {MAX_SEQUENCES}"
        raise ValueError(msg)
    # Lists: a row has few sequences, for which NumPy needs several times as long.
    shared = flat.shared_lengths
    prompts = len(flat.prompt_tokens) * len(flat.lengths) if shared is None else sum(shared.tolist())
    tokens = sum(flat.lengths.tolist()) + prompts
    if tokens > MAX_TOKENS:
        msg = f"the sequences of a trajectory have {tokens} tokens with their prompts, more than {MAX_TOKENS}"
        raise ValueError(msg)


def _samples(flat: Flat) -> None:
    n, lengths = len(flat.texts), flat.lengths.tolist()
    if len(flat.finish_reasons) != n or any(len(values) != n for values in flat.metrics.values()):
        msg = f"{n} texts, {len(flat.finish_reasons)} finish reasons and the metrics differ in number"
        raise ValueError(msg)
    if unknown := set(flat.finish_reasons) - _FINISH_REASONS:
        msg = f"unknown finish reasons {sorted(unknown)}; use one of {', '.join(FinishReason)}"
        raise ValueError(msg)
    for name, values in flat.metrics.items():
        if not _METRIC_NAME.fullmatch(name):
            msg = f"{name[:80]!r} is not the name of a metric; use letters, digits and ._/- only"
            raise ValueError(msg)
        if not np.isfinite(values).all():
            msg = f"metric {name!r} of a sample is not finite"
            raise ValueError(msg)
    counts = [1] * n if flat.sequence_counts is None else flat.sequence_counts.tolist()
    if len(counts) != n or min(counts, default=1) < 1:
        msg = f"sequence_counts {counts[:8]} must give each of {n} samples at least one sequence"
        raise ValueError(msg)
    if sum(counts) != len(lengths) or min(lengths, default=0) < 0:
        msg = f"{n} samples have {sum(counts)} sequences, but there are {len(lengths)} lengths"
        raise ValueError(msg)
    if not 0 <= flat.greedy_samples < n:
        msg = f"greedy_samples is {flat.greedy_samples}; of {n} samples, at least one must be no baseline"
        raise ValueError(msg)
    shared = None if flat.shared_lengths is None else flat.shared_lengths.tolist()
    if shared is not None and (
        len(shared) != len(lengths) or min(shared, default=0) < 0 or max(shared, default=0) > len(flat.prompt_tokens)
    ):
        msg = f"shared_lengths {shared[:8]} must give each sequence from 0 to all prompt tokens"
        raise ValueError(msg)


def _tokens(flat: Flat) -> None:
    total, mask = sum(flat.lengths.tolist()), flat.loss_mask
    sizes = {
        len(flat.token_ids),
        len(flat.logprobs),
        len(flat.versions),
        total if mask is None else len(mask),
    }
    if sizes != {total}:
        masks = "" if mask is None else f", {len(mask)} loss_mask"
        msg = (
            f"arrays of {len(flat.token_ids)} token_ids, {len(flat.logprobs)} logprobs, {len(flat.versions)} "
            f"versions{masks} do not hold {total} tokens"
        )
        raise ValueError(msg)
    if not total or (mask is not None and not mask.any()):
        msg = "no token of the trajectory is trained; set loss_mask where the policy sampled"
        raise ValueError(msg)
    if flat.greedy_samples and flat.trained_lengths[-flat.greedy_samples :].any():
        msg = "a token of a greedy baseline sample is trained; set its loss_mask to False"
        raise ValueError(msg)
    targets = flat.targets
    if targets is not None and (targets.shape != (total,) or targets.dtype != np.float32):
        msg = f"targets of a trajectory are {targets.dtype}{list(targets.shape)}, not [{total}] float32"
        raise ValueError(msg)
    if targets is not None and not np.isfinite(targets).all():
        msg = "a target of a trajectory is not finite"
        raise ValueError(msg)
    foreign = flat.versions < 0
    # Of an example from the data, no policy sampled any token.
    if foreign.any() and not foreign.all() and (mask is None or (foreign & mask).any()):
        msg = "loss_mask is true for a token that no policy sampled (version -1)"
        raise ValueError(msg)
    if foreign.any() and flat.logprobs[foreign].any():
        msg = "a token that no policy sampled (version -1) has a log-prob other than 0"
        raise ValueError(msg)
    if flat.shared_lengths is not None or not len(flat.prompt_tokens):
        begins = np.cumsum(flat.lengths, dtype=np.int64) - flat.lengths
        if flat.trained[begins[(flat.shared == 0) & (flat.lengths > 0)]].any():
            msg = "loss_mask is true for the first token of a sequence, which has no token before it"
            raise ValueError(msg)


def _entropies(flat: Flat) -> None:
    entropies, total = flat.entropies, len(flat.token_ids)
    if entropies is None:
        return
    if entropies.shape != (total,) or entropies.dtype != np.float32:
        msg = f"entropies of a trajectory are {entropies.dtype}{list(entropies.shape)}, not [{total}] float32"
        raise ValueError(msg)
    if not (np.isfinite(entropies) & (entropies >= 0)).all():
        msg = "an entropy of a trajectory is negative or not finite"
        raise ValueError(msg)


def _fingerprints(flat: Flat) -> None:
    if flat.fingerprints and len(flat.fingerprints) != (count := len(sampling_versions(flat.versions))):
        msg = (
            f"a trajectory has {len(flat.fingerprints)} fingerprints, but {count} versions sampled its tokens; "
            "give one for each version, or none"
        )
        raise ValueError(msg)


def _players(flat: Flat) -> None:
    players, count = flat.players, len(flat.lengths)
    if players and (len(players) != count or not all(map(PLAYER_NAME.fullmatch, players))):
        msg = f"players {str(players)[:200]} of a trajectory must name one of each of its {count} sequences"
        raise ValueError(msg)


def _observed(flat: Flat) -> None:
    if not flat.observed:
        return
    if len(flat.observed) != len(flat.lengths):
        msg = f"a trajectory has observed media of {len(flat.observed)} sequences, but {len(flat.lengths)} of these"
        raise ValueError(msg)
    for i, (length, observed) in enumerate(zip(flat.sequence_lengths, flat.observed, strict=True)):
        bounds = [0, *(bound for one in observed for bound in (one.start, one.start + one.positions.shape[1]))]
        if sorted(bounds) != bounds or bounds[-1] > length:
            msg = f"observed media of sequence {i} overlap, are out of order or reach beyond its {length} tokens"
            raise ValueError(msg)


def _turns(flat: Flat) -> None:
    said = flat.conversations
    if said is not None and (said.ndim != 1 or said.dtype != np.uint8):
        msg = f"conversations of a trajectory are {said.dtype}{list(said.shape)}, not one-dimensional uint8"
        raise ValueError(msg)
    rewards = flat.turn_rewards
    if rewards is None:
        return
    turns = len(flat.turn_spans)
    if rewards.shape != (turns,) or rewards.dtype.kind != "f" or not np.isfinite(rewards).all():
        msg = f"turn_rewards of a trajectory are {rewards.dtype}{list(rewards.shape)}, not {turns} finite numbers"
        raise ValueError(msg)


def _spans(flat: Flat) -> None:
    spans = flat.spans
    if spans is None:
        return
    if spans.ndim != 2 or spans.shape[1:] != (2,) or spans.dtype != np.int32:  # noqa: PLR2004
        msg = f"spans of a trajectory are {spans.dtype}{list(spans.shape)}, not [spans, 2] int32"
        raise ValueError(msg)
    edges = spans.reshape(-1).astype(np.int64)
    if len(edges) and ((np.diff(edges) < 0).any() or edges[0] < 0 or edges[-1] > len(flat.token_ids)):
        msg = "spans of a trajectory overlap, are out of order or reach beyond its tokens"
        raise ValueError(msg)
    ends = np.cumsum(flat.lengths, dtype=np.int64)
    crosses = np.searchsorted(ends, edges[0::2], side="right") != np.searchsorted(ends, edges[1::2], side="left")
    if (edges[0::2] == edges[1::2]).any() or crosses.any():
        msg = "a span of a trajectory is empty, or reaches from one sequence into the next"
        raise ValueError(msg)

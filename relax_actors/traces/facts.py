"""A trace's further facts as plain JSON, with which it comes back bit for bit.

Arrays of numbers of float32 are written as decimal numbers of double precision, which keep every bit. Masks and
versions are runs `[begin, end, value]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages.media import MediaSource
from relax_actors.messages.samples import NOT_SAMPLED, TokenSequence
from relax_actors.traces import fields
from relax_actors.traces.model import Trace, TraceError

Array = NDArray[Any]
KEY = "relax_actors"
"""Name of the facts in the free fields of a format."""
FORMAT = 1
"""Version of their layout."""
PLAIN = (
    *("run", "row", "sample", "step", "text", "finish_reason", "reward", "prompt", "answer", "metadata"),
    *("prompt_messages", "messages", "tools", "greedy", "author"),
)
"""Fields of a trace that are plain data."""


def facts_of(trace: Trace) -> dict[str, Any]:
    """Return the facts of a trace without the tokens and log-probs of its sequences."""
    facts: dict[str, Any] = {"format": FORMAT, **{name: getattr(trace, name) for name in PLAIN}}
    return facts | {
        "prompt_token_ids": trace.prompt_tokens.tolist(),
        "components": dict(trace.components),
        "metrics": dict(trace.metrics),
        "token_values": {name: each.astype(np.float64).tolist() for name, each in trace.token_values.items()},
        "turn_rewards": None if trace.turn_rewards is None else trace.turn_rewards.astype(np.float64).tolist(),
        "media": [asdict(medium) for medium in trace.media],
        "fingerprints": [[version, text] for version, text in trace.fingerprints.items()],
        "sequences": [_sequence_facts(each) for each in trace.sequences],
    }


def _sequence_facts(sequence: TokenSequence) -> dict[str, Any]:
    return {
        "trained": runs_of(sequence.loss_mask),
        "versions": runs_of(sequence.versions),
        "spans": None if sequence.spans is None else sequence.spans.tolist(),
        "player": sequence.player,
    }


def trace_with(facts: Mapping[str, Any], tokens: Sequence[tuple[Array, Array]], origin: str) -> Trace:
    """Return the trace of facts and sequences' tokens and log-probs, `[len]` each.

    Raises:
        TraceError: the facts do not fit the tokens, or are malformed.
    """
    try:
        if facts["format"] != FORMAT:
            msg = f"{origin}: its facts have format {facts['format']!r:.40}, and this version reads {FORMAT}"
            raise TraceError(msg)
        given = facts["sequences"]
        if len(given) != len(tokens):
            msg = f"{origin}: {len(tokens)} sequences of tokens, but masks of {len(given)}; export the trace again"
            raise TraceError(msg)
        sequences = tuple(
            _sequence(own, ids, logprobs, f"{origin}, sequence {i}")
            for i, (own, (ids, logprobs)) in enumerate(zip(given, tokens, strict=True))
        )
        rewards = facts["turn_rewards"]
        return Trace(
            **{name: facts[name] for name in PLAIN},
            prompt_tokens=fields.token_ids(facts, "prompt_token_ids", origin),
            sequences=sequences,
            components=dict(facts["components"]),
            metrics=dict(facts["metrics"]),
            token_values={name: np.array(each, np.float32) for name, each in facts["token_values"].items()},
            turn_rewards=None if rewards is None else np.array(rewards, np.float32),
            media=tuple(MediaSource(**medium) for medium in facts["media"]),
            fingerprints={int(version): str(text) for version, text in facts["fingerprints"]},
            origin=origin,
        )
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
        what = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        msg = f"{origin}: its facts are malformed ({what}); export the trace again"
        raise TraceError(msg) from error


def _sequence(facts: Mapping[str, Any], ids: Array, logprobs: Array, where: str) -> TokenSequence:
    n, spans = len(ids), facts["spans"]
    if len(logprobs) != n:
        msg = f"{where}: {n} tokens and {len(logprobs)} log-probs; record one for each token"
        raise TraceError(msg)
    mask, versions = (array_of(facts[name], n, f"{where}, {name}") for name in ("trained", "versions"))
    return TokenSequence(
        ids,
        mask.astype(np.bool_),
        np.where(versions == NOT_SAMPLED, np.float32(0), logprobs).astype(np.float32),
        versions.astype(np.int32),
        None if spans is None else np.array(spans, np.int32).reshape(-1, 2),
        player=facts["player"],
    )


def runs_of(values: Array) -> list[list[int]]:
    """Return the runs `[begin, end, value]` of equal values."""
    if not len(values):
        return []
    edges = [0, *(np.flatnonzero(np.diff(values.astype(np.int64))) + 1).tolist(), len(values)]
    return [[begin, end, int(values[begin])] for begin, end in pairwise(edges)]


def array_of(given: Sequence[Sequence[int]], length: int, where: str) -> Array:
    """Return the values of runs, `[length] int64`; raises TraceError."""
    bounds = [0, *(end for _, end, _ in given)]
    if [begin for begin, _, _ in given] != bounds[:-1] or bounds[-1] != length or sorted(bounds) != bounds:
        msg = f"{where}: it is for {bounds[-1]} tokens, and the sequence has {length}; masks and tokens must match"
        raise TraceError(msg)
    values = np.array([value for _, _, value in given], np.int64)
    return np.repeat(values, np.diff(np.array(bounds, np.int64)))

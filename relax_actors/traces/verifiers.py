"""Traces of verifiers: the branches of a rollout, each with token ids, a mask of the sampled ones, and log-probs.

Branches repeat the tokens that they share; a sampled token is trained in the first branch that has it. What a trace of
verifiers has no fields for is in `info.relax_actors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_actors.messages.samples import NOT_SAMPLED, TokenSequence
from relax_actors.traces import fields
from relax_actors.traces.exact_json import decoded
from relax_actors.traces.facts import KEY, facts_of, trace_with
from relax_actors.traces.head import Head, head_of
from relax_actors.traces.model import Array, Trace, TraceError
from relax_actors.traces.turns import FIRST_VERSION, check_branches, without_repeats

VERSION = 1


def record_of(trace: Trace) -> dict[str, Any]:
    """Return a trace as verifiers names its parts."""
    return {
        "version": VERSION,
        "id": "/".join(filter(None, (trace.run, trace.row, str(trace.sample)))),
        "reward": trace.reward,
        "rewards": {name: {"value": value} for name, value in trace.components.items()},
        "metrics": dict(trace.metrics),
        "branches": [
            {
                "token_ids": each.token_ids.tolist(),
                "sampled_mask": each.sampled.tolist(),
                "logprobs": each.logprobs.astype(np.float64).tolist(),
            }
            for each in trace.sequences
        ],
        "info": {KEY: facts_of(trace)},
    }


def trace_of(record: Mapping[str, Any], origin: str) -> Trace:
    """Return the trace of a record.

    Raises:
        TraceError: a branch lacks token ids, a mask or log-probs, or they differ in length.
    """
    branches = fields.objects(record, "branches", origin)
    read = [_branch(branch, f"{origin}, branch {number}") for number, branch in enumerate(branches)]
    info = record.get("info")
    if isinstance(facts := decoded(info.get(KEY)) if isinstance(info, dict) else None, dict):
        trace = trace_with(facts, [(ids, logprobs) for ids, _, logprobs in read], origin)
        for number, ((_, mask, _), sequence) in enumerate(zip(read, trace.sequences, strict=True)):
            if not np.array_equal(mask, sequence.sampled):
                msg = f"{origin}, branch {number}: sampled_mask does not match info.{KEY}; export it again"
                raise TraceError(msg)
        return trace
    check_branches(len(read), origin)
    sequences = [
        TokenSequence(ids, mask, np.where(mask, logprobs, np.float32(0)), _versions(mask))
        for ids, mask, logprobs in read
    ]
    first = sequences[0]
    begin = int(np.argmax(first.sampled))
    if not first.sampled.any() or not begin:
        msg = f"{origin}, branch 0: no prompt with sampled tokens behind it; correct sampled_mask"
        raise TraceError(msg)
    return Trace(
        run=str(record.get("id") or ""),
        prompt_tokens=first.token_ids[:begin],
        sequences=without_repeats(sequences),
        reward=fields.number(record.get("reward"), "reward", origin),
        origin=origin,
    )


def head(record: Mapping[str, Any]) -> Head:
    """Return the head of a record."""
    info = record.get("info")
    if isinstance(info, dict) and isinstance(facts := info.get(KEY), dict):
        return head_of(facts, facts.get("prompt_token_ids"))
    branches = record.get("branches")
    first = branches[0] if isinstance(branches, list) and branches else None
    own = first if isinstance(first, dict) else {}
    ids, mask = own.get("token_ids"), own.get("sampled_mask")
    prompt = ids[: mask.index(True)] if isinstance(ids, list) and isinstance(mask, list) and True in mask else None
    return head_of({"reward": record.get("reward")}, prompt)


def _branch(branch: Mapping[str, Any], where: str) -> tuple[Array, Array, Array]:
    """Return token ids `[len] int32`, sampled mask `[len] bool` and log-probs `[len] float32` of a branch."""
    ids = fields.token_ids(branch, "token_ids", where)
    mask = branch.get("sampled_mask")
    if not isinstance(mask, list) or any(value not in (True, False) for value in mask):
        msg = f"{where}: sampled_mask is {mask!r:.60}; write true for each sampled token, and false for others"
        raise TraceError(msg)
    if len(mask) != len(ids):
        msg = f"{where}: sampled_mask has {len(mask)} values for {len(ids)} tokens; write one for each token"
        raise TraceError(msg)
    own = branch.get("logprobs")
    if isinstance(own, list) and len(own) == len(mask):
        branch = {**branch, "logprobs": [0.0 if v is None and not m else v for v, m in zip(own, mask, strict=True)]}
    return ids, np.array(mask, np.bool_), fields.logprobs(branch, "logprobs", len(ids), where)


def _versions(mask: Array) -> Array:
    return np.where(mask, FIRST_VERSION, NOT_SAMPLED).astype(np.int32)

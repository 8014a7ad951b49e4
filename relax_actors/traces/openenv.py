"""OpenEnv's `TrainingTrace`, schema 1: calls with whole prompts and masks.

The mask of a call covers prompt and completion, and is authoritative: a sampled token with 0 is context. Rewards are
not part of the schema. What it has no fields for is in `metadata.relax_actors` of the first call; a file without it is
read by the calls alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relax_actors.messages.said import said
from relax_actors.traces import fields
from relax_actors.traces.exact_json import decoded
from relax_actors.traces.facts import KEY, facts_of, trace_with
from relax_actors.traces.head import Head, head_of
from relax_actors.traces.layout import LAYOUT, laid_out, turns_and_layout
from relax_actors.traces.model import Array, Trace, TraceError
from relax_actors.traces.turns import Turn, sequences_of, turns_of

VERSION = 1


def record_of(trace: Trace) -> dict[str, Any]:
    """Return a trace as a `TrainingTrace`; raises TraceError."""
    flat, layout = turns_and_layout(trace)
    if not flat:
        msg = f"{trace.name}: no policy sampled a token of it, and OpenEnv's trace is a list of turns; export Parquet"
        raise TraceError(msg)
    masks = [each.loss_mask[begin:end] for each in trace.sequences for begin, end in _spans(turns_of(each))]
    turns = [
        _turn_record(turn, mask, f"{trace.name}, turn {i}", i)
        for i, (turn, mask) in enumerate(zip(flat, masks, strict=True))
    ]
    turns[0]["request"] = {"messages": trace.prompt_messages, "tools": trace.tools}
    turns[0]["metadata"] = {KEY: {**facts_of(trace), LAYOUT: layout}}
    return {"schema_version": VERSION, "turns": turns}


def _spans(turns: Sequence[Turn]) -> list[tuple[int, int]]:
    return [(len(turn.context), len(turn.context) + len(turn.tokens)) for turn in turns]


def _turn_record(turn: Turn, mask: Array, where: str, number: int) -> dict[str, Any]:
    if len(above := turn.logprobs[turn.logprobs > 0]):
        msg = f"{where}: its log-prob {float(above[0]):.6g} is above 0, which OpenEnv refuses; export Parquet"
        raise TraceError(msg)
    return {
        "node_id": str(number),
        "prompt_token_ids": turn.context.tolist(),
        "completion_token_ids": turn.tokens.tolist(),
        "per_token_logps": turn.logprobs.astype(np.float64).tolist(),
        "loss_mask": [0] * len(turn.context) + mask.astype(int).tolist(),
        "request": {},
        "response": {},
        "metadata": {},
    }


def trace_of(record: Mapping[str, Any], origin: str) -> Trace:
    """Return the trace of a `TrainingTrace`.

    Raises:
        TraceError: a turn lacks token ids, log-probs or its mask, or they differ in length; it has media; or no token
            is trained.
    """
    given = fields.objects(record, "turns", origin)
    _check_nodes(given, origin)
    read = [_turn(each, f"{origin}, turn {number}") for number, each in enumerate(given)]
    turns, masks = [turn for turn, _ in read], [mask for _, mask in read]
    metadata = given[0].get("metadata")
    if isinstance(facts := decoded(metadata.get(KEY)) if isinstance(metadata, dict) else None, dict):
        trace = trace_with(facts, laid_out(facts.get(LAYOUT), turns, origin), origin)
        _check_masks(trace, masks, origin)
        return trace
    if not any(mask.any() for mask in masks):
        msg = f"{origin}: loss_mask is 0 at every token, so nothing is trained; write 1 for the tokens to train"
        raise TraceError(msg)
    answered = [(turn, mask) for turn, mask in read if len(turn.tokens)]
    requests = [_messages(turn) for turn in given]
    for number, shown in enumerate(requests):
        for message in shown:
            fields.check_text(message, f"{origin}, turn {number}")
    messages = requests[0]
    return Trace(
        prompt_tokens=turns[0].context,
        sequences=sequences_of([turn for turn, _ in answered], [mask for _, mask in answered]),
        prompt="\n".join(text for _, text in said(messages)),
        prompt_messages=messages,
        origin=origin,
    )


def head(record: Mapping[str, Any]) -> Head:
    """Return the head of a record; it has a reward only in our own fields."""
    turns = record.get("turns")
    first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], dict) else {}
    metadata = first.get("metadata")
    if isinstance(metadata, dict) and isinstance(facts := metadata.get(KEY), dict):
        return head_of(facts, facts.get("prompt_token_ids"))
    return head_of({}, first.get("prompt_token_ids"))


def _messages(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    request = turn.get("request")
    listed = request.get("messages") if isinstance(request, dict) else None
    return [message for message in listed if isinstance(message, dict)] if isinstance(listed, list) else []


def _check_nodes(turns: Sequence[Mapping[str, Any]], origin: str) -> None:
    """Raise TraceError unless each turn has a `node_id` of its own."""
    nodes: dict[str, int] = {}
    for number, turn in enumerate(turns):
        node = turn.get("node_id")
        if not isinstance(node, str) or not node:
            msg = f"{origin}, turn {number}: node_id is {node!r:.60}; write a text of its own for each turn"
            raise TraceError(msg)
        if nodes.setdefault(node, number) != number:
            msg = f"{origin}, turn {number}: node_id {node!r:.60} is that of turn {nodes[node]}; write each turn once"
            raise TraceError(msg)


def _turn(turn: Mapping[str, Any], where: str) -> tuple[Turn, Array]:
    """Return a turn and the mask of its completion, `[len] bool`."""
    context, tokens = (fields.token_ids(turn, f"{name}_token_ids", where) for name in ("prompt", "completion"))
    logprobs = fields.logprobs(turn, "per_token_logps", len(tokens), where)
    mask, whole = turn.get("loss_mask"), len(context) + len(tokens)
    if not isinstance(mask, list) or any(type(value) is not int or value not in (0, 1) for value in mask):
        msg = f"{where}: loss_mask is {mask!r:.60}; write 1 for each token to train, and 0 for others"
        raise TraceError(msg)
    if len(mask) != whole:
        msg = (
            f"{where}: loss_mask has {len(mask)} values for {whole} tokens of prompt and completion; write one for each"
        )
        raise TraceError(msg)
    if any(mask[: len(context)]):
        msg = f"{where}: loss_mask is 1 for token {mask.index(1)} of the prompt; only completions are trained"
        raise TraceError(msg)
    return Turn(context, tokens, logprobs, where), np.array(mask[len(context) :], np.bool_)


def _check_masks(trace: Trace, masks: Sequence[Array], origin: str) -> None:
    """Raise TraceError unless the masks of the turns are those of our own fields."""
    own = [each.loss_mask[begin:end] for each in trace.sequences for begin, end in _spans(turns_of(each))]
    for number, (mask, kept) in enumerate(zip(masks, own, strict=True)):
        if not np.array_equal(mask, kept):
            msg = f"{origin}, turn {number}: loss_mask does not match metadata.{KEY}; export it again"
            raise TraceError(msg)

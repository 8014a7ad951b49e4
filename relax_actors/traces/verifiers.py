"""Traces of verifiers, version 1: a graph of messages with tokens and masks.

A path from a root to a leaf is a branch. The mask says what is trained, and log-probs are those of masked tokens. A
message that branches share is trained in the first one. What a trace of verifiers has no fields for is in
`info.relax_actors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import numpy as np

from relax_actors.messages.said import said
from relax_actors.messages.samples import NOT_SAMPLED, TokenSequence, runs
from relax_actors.traces import fields
from relax_actors.traces.exact_json import decoded
from relax_actors.traces.facts import KEY, array_of, facts_of, trace_with
from relax_actors.traces.head import Head, head_of
from relax_actors.traces.message_graph import Read, branches_of, check_size, prompt_of
from relax_actors.traces.model import Array, Trace, TraceError
from relax_actors.traces.turns import FIRST_VERSION, without_repeats

VERSION = 1
UNTRAINED = "untrained_logprobs"
"""Log-probs of sampled tokens that are not trained, of each sequence, among our own facts."""
DECIMALS, LEAST_VALUES = 4, 4
"""Decimals that verifiers rounds log-probs of JSON records to, and different values that show that it has."""


def record_of(trace: Trace) -> dict[str, Any]:
    """Return a trace for verifiers with all digits; sequences are separate chains."""
    nodes: list[dict[str, Any]] = []
    answers = iter([text for role, text in said(trace.messages) if role == "assistant"] or [trace.text])
    for sequence in trace.sequences:
        nodes += _chain(sequence, trace.prompt, answers, len(nodes))
    untrained = [each.logprobs[each.sampled & ~each.loss_mask] for each in trace.sequences]
    facts = {**facts_of(trace), UNTRAINED: [own.astype(np.float64).tolist() for own in untrained]}
    reward = {} if trace.reward is None else {"reward": {"score": trace.reward, "weight": 1.0}}
    parts = {f"component/{name}": value for name, value in trace.components.items()}
    return {
        "version": VERSION,
        "id": "/".join(filter(None, (trace.run, trace.row, str(trace.sample)))),
        "verifiers": {"version": f"relax-actors {version('relax-actors')}"},
        "task": {"type": "Task", "data": {"idx": 0, "prompt": trace.prompt}},
        "agent": {"config": {}, "name": "agent"},
        "nodes": nodes,
        "rewards": reward,
        "metrics": {**trace.metrics, **parts},
        "info": {KEY: facts},
        "is_completed": True,
        "ok": True,
    }


def _chain(sequence: TokenSequence, prompt: str, answers: Iterator[str], first: int) -> Iterator[dict[str, Any]]:
    """Yield a sequence's messages, runs of tokens with one mask, from `first` on."""
    mask = sequence.loss_mask
    edges = sorted({0, len(mask), *runs(mask).flatten().tolist()})
    for number, (begin, end) in enumerate(pairwise(edges)):
        trained = bool(mask[begin])
        message = {"role": "user", "content": "" if begin else prompt}
        if trained:
            message = {"role": "assistant", "content": next(answers, "")}
        yield {
            "parent": first + number - 1 if number else None,
            "message": message,
            "sampled": trained,
            "timestamp": 0.0,
            "token_ids": sequence.token_ids[begin:end].tolist(),
            "mask": [trained] * (end - begin),
            "logprobs": sequence.logprobs[begin:end].astype(np.float64).tolist() if trained else [],
        }


def trace_of(record: Mapping[str, Any], origin: str) -> Trace:
    """Return the trace of a trace of verifiers.

    Raises:
        TraceError: a message lacks token ids, a mask or log-probs, or they differ in length; log-probs are rounded; it
            has media; its agent is not trained; there are too many messages; or no token is trained.
    """
    nodes = fields.objects(record, "nodes", origin)
    _check_agent(record, origin)
    info = record.get("info")
    if isinstance(facts := decoded(info.get(KEY)) if isinstance(info, dict) else None, dict):
        return _own(facts, branches_of(nodes, origin), origin)
    check_size(nodes, origin)
    _check_media(record, nodes, origin)
    read = branches_of(nodes, origin)
    _check_digits(nodes, origin)
    prompt = prompt_of(nodes)
    if not prompt or not any(mask.any() for _, mask, _ in read) or any(mask[:1].any() for _, mask, _ in read):
        msg = f"{origin}: no prompt with trained tokens behind it; correct the masks of its messages"
        raise TraceError(msg)
    sequences = [TokenSequence(ids, mask, logprobs, _versions(mask)) for ids, mask, logprobs in read]
    return Trace(
        run=str(record.get("id") or ""),
        prompt_tokens=np.array(prompt, np.int32),
        sequences=without_repeats(sequences),
        reward=_reward(record, origin),
        origin=origin,
    )


def _own(facts: dict[str, Any], read: Sequence[Read], origin: str) -> Trace:
    """Return the trace of our facts, and of each chain's tokens and log-probs."""
    given, untrained = facts["sequences"], facts[UNTRAINED]
    if not len(given) == len(untrained) == len(read):
        msg = f"{origin}: {len(read)} branches, but masks of {len(given)}; export the trace again"
        raise TraceError(msg)
    tokens = []
    for number, ((ids, mask, logprobs), own, rest) in enumerate(zip(read, given, untrained, strict=True)):
        where = f"{origin}, branch {number}"
        trained, versions = (array_of(own[name], len(ids), f"{where}, {name}") for name in ("trained", "versions"))
        if not np.array_equal(mask, trained.astype(np.bool_)):
            msg = f"{where}: mask does not match info.{KEY}; export it again"
            raise TraceError(msg)
        left = (versions != NOT_SAMPLED) & ~mask
        whole = logprobs.copy()
        whole[left] = fields.logprobs({UNTRAINED: rest}, UNTRAINED, int(left.sum()), where)
        tokens.append((ids, whole))
    return trace_with(facts, tokens, origin)


def head(record: Mapping[str, Any]) -> Head:
    """Return the head of a record."""
    info = record.get("info")
    if isinstance(info, dict) and isinstance(facts := info.get(KEY), dict):
        return head_of(facts, facts.get("prompt_token_ids"))
    try:
        reward = _reward(record, "")
    except TraceError:
        reward = float("nan")
    return head_of({"reward": reward}, prompt_of(record.get("nodes")))


def _reward(record: Mapping[str, Any], origin: str) -> float | None:
    """Return the reward: the weighted sum of those that have a score."""
    given = record.get("rewards")
    if not isinstance(given, dict):
        return None
    total, scored = 0.0, False
    for name, each in given.items():
        own = each if isinstance(each, dict) else {}
        score, weight = (fields.number(own.get(key), f"rewards.{name}.{key}", origin) for key in ("score", "weight"))
        if score is not None:
            total, scored = total + score * (1.0 if weight is None else weight), True
    return fields.number(total, "the sum of its rewards", origin) if scored else None


def _check_agent(record: Mapping[str, Any], origin: str) -> None:
    """Raise TraceError if the trace is of an agent that its run did not train, such as a judge."""
    agent = record.get("agent")
    trainable = agent.get("trainable", True) if isinstance(agent, dict) else True
    if trainable is not True:
        msg = f"{origin}: agent.trainable is {trainable!r:.40}, so its tokens train no policy; leave the trace out"
        raise TraceError(msg)


def _check_media(record: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], origin: str) -> None:
    """Raise TraceError if a message has media.

    The map of placeholders is the renderer's, and traces without media have it, too.
    """
    given = record.get("mm_token_type_id_map")
    placeholders = {int(token) for token in given} if isinstance(given, dict) else set[int]()
    for number, node in enumerate(nodes):
        where, ids = f"{origin}, message {number}", node.get("token_ids")
        fields.check_text(node.get("message"), where)
        if node.get("multi_modal_data"):
            fields.refuse_media("multi_modal_data", where)
        if placeholders and isinstance(ids, list) and not placeholders.isdisjoint(ids):
            fields.refuse_media("a token of mm_token_type_id_map", where)


def _check_digits(nodes: Sequence[Mapping[str, Any]], origin: str) -> None:
    """Raise TraceError if log-probs are those of a record that verifiers has rounded."""
    values = {float(value) for node in nodes for value in node.get("logprobs") or ()} - {0.0}
    if len(values) >= LEAST_VALUES and all(value == round(value, DECIMALS) for value in values):
        msg = (
            f"{origin}: its log-probs are rounded to {DECIMALS} decimals, and the loss compares with the exact ones; "
            "write records with `trace.to_record(float_decimals=None)`"
        )
        raise TraceError(msg)


def _versions(mask: Array) -> Array:
    return np.where(mask, FIRST_VERSION, NOT_SAMPLED).astype(np.int32)

"""Traces of verifiers, version 1: a graph of messages, each with the tokens that it adds, a mask and log-probs.

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
from relax_actors.traces.model import Array, Trace, TraceError
from relax_actors.traces.turns import FIRST_VERSION, check_branches, without_repeats

VERSION = 1
UNTRAINED = "untrained_logprobs"
"""Log-probs of sampled tokens that are not trained, of each sequence, among our own facts."""
DECIMALS, LEAST_VALUES = 4, 4
"""Decimals that verifiers rounds log-probs of JSON records to, and different values that show that it has."""
Read = tuple[Array, Array, Array]
"""Token ids `[len] int32`, trained mask `[len] bool` and log-probs `[len] float32` of a branch."""


def record_of(trace: Trace) -> dict[str, Any]:
    """Return a trace as verifiers writes one with all digits; each sequence is a chain of messages of its own."""
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
    """Yield the messages of a sequence, each run of tokens with the same mask, from number `first` on."""
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
        TraceError: a message lacks token ids, a mask or log-probs, or they differ in length; log-probs are rounded; or
            no token is trained.
    """
    nodes = fields.objects(record, "nodes", origin)
    read = _branches(nodes, origin)
    info = record.get("info")
    if isinstance(facts := decoded(info.get(KEY)) if isinstance(info, dict) else None, dict):
        return _own(facts, read, origin)
    check_branches(len(read), origin)
    _check_digits(nodes, origin)
    sequences = [TokenSequence(ids, mask, logprobs, _versions(mask)) for ids, mask, logprobs in read]
    first = next((each for each in sequences if each.loss_mask.any()), sequences[0])
    begin = int(np.argmax(first.loss_mask))
    if not begin:
        msg = f"{origin}: no prompt with trained tokens behind it; correct the masks of its messages"
        raise TraceError(msg)
    return Trace(
        run=str(record.get("id") or ""),
        prompt_tokens=first.token_ids[:begin],
        sequences=without_repeats(sequences),
        reward=_reward(record, origin),
        origin=origin,
    )


def _own(facts: dict[str, Any], read: Sequence[Read], origin: str) -> Trace:
    """Return the trace of our own facts, and of the tokens and log-probs of each chain of messages."""
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
    nodes, prompt = record.get("nodes"), []
    for node in nodes if isinstance(nodes, list) else ():
        mask, ids = (node.get("mask"), node.get("token_ids")) if isinstance(node, dict) else (None, None)
        if not isinstance(mask, list) or not isinstance(ids, list):
            break
        prompt += ids[: mask.index(True) if True in mask else None]
        if True in mask:
            break
    try:
        reward = _reward(record, "")
    except TraceError:
        reward = float("nan")
    return head_of({"reward": reward}, prompt)


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


def _branches(nodes: Sequence[Mapping[str, Any]], origin: str) -> list[Read]:
    """Return the branches of a graph: the path to each message that no other continues."""
    own = [_node(node, f"{origin}, message {number}") for number, node in enumerate(nodes)]
    parents: list[int | None] = []
    for number, node in enumerate(nodes):
        parent = node.get("parent")
        if parent is not None and (type(parent) is not int or not 0 <= parent < number):
            msg = f"{origin}, message {number}: parent is {parent!r:.40}; write the number of an earlier message"
            raise TraceError(msg)
        parents.append(parent)
    leaves = [number for number in range(len(nodes)) if number not in {*parents}]
    check_branches(len(leaves), origin)
    rejected = _rejected(nodes)
    branches = []
    for leaf in leaves:
        path = [leaf]
        while (before := parents[path[-1]]) is not None:
            path.append(before)
        ids, mask, logprobs = (np.concatenate(arrays) for arrays in zip(*(own[i] for i in reversed(path)), strict=True))
        if leaf in rejected:
            mask, logprobs = np.zeros_like(mask), np.zeros_like(logprobs)
        branches.append((ids, mask, logprobs))
    return branches


def _rejected(nodes: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the summaries of a conversation that no later message continued from; verifiers does not train them."""
    links = [
        (number, link)
        for number, node in enumerate(nodes)
        for link in node.get("semantic_parents") or ()
        if isinstance(link, dict)
    ]
    accepted = {link.get("node") for _, link in links if link.get("type") == "compaction"}
    return {number for number, link in links if link.get("type") == "compaction_attempt"} - accepted


def _node(node: Mapping[str, Any], where: str) -> Read:
    ids, mask = fields.token_ids(node, "token_ids", where), node.get("mask")
    if not isinstance(mask, list) or any(value not in (True, False) for value in mask):
        msg = f"{where}: mask is {mask!r:.60}; write true for each token to train, and false for others"
        raise TraceError(msg)
    if len(mask) != len(ids):
        msg = f"{where}: mask has {len(mask)} values for {len(ids)} tokens; write one for each token"
        raise TraceError(msg)
    trained = np.array(mask, np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    if trained.any():
        logprobs[trained] = fields.logprobs(node, "logprobs", int(trained.sum()), where)
    return ids, trained, logprobs


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

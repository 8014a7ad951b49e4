"""Message graph of a verifiers trace: branches, and the first trained prompt.

The graph of a sub-agent has a root of its own, and its messages come before the next one of the agent that called it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relax_actors.traces import fields
from relax_actors.traces.model import Array, TraceError
from relax_actors.traces.turns import MAX_TURNS, check_branches

MAX_MESSAGES = 20 * MAX_TURNS
"""Messages on all branches of a trace of another program; a message that branches share counts in each."""

Read = tuple[Array, Array, Array]
"""Token ids `[len] int32`, trained mask `[len] bool` and log-probs `[len] float32` of a branch."""


def check_size(nodes: Sequence[Mapping[str, Any]], origin: str) -> None:
    """Raise TraceError if another program's trace has too many turns or messages."""
    parents = [_parent(node, number) for number, node in enumerate(nodes)]
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent is None else depths[parent] + 1)
    turns = sum(isinstance(mask := node.get("mask"), list) and True in mask for node in nodes)
    messages = sum(depths[leaf] for leaf in _leaves(parents))
    for count, limit, what in ((turns, MAX_TURNS, "turns"), (messages, MAX_MESSAGES, "messages on its branches")):
        if count > limit:
            msg = f"{origin}: {count} {what}, more than {limit}; split the trace into samples"
            raise TraceError(msg)


def branches_of(nodes: Sequence[Mapping[str, Any]], origin: str) -> list[Read]:
    """Return the branches of a graph: the path to each message that no other continues.

    Raises:
        TraceError: a message is malformed, or names no earlier message as its parent; or there are too many branches.
    """
    own = [_node(node, f"{origin}, message {number}") for number, node in enumerate(nodes)]
    for number, node in enumerate(nodes):
        if (given := node.get("parent")) is not None and _parent(node, number) is None:
            msg = f"{origin}, message {number}: parent is {given!r:.40}; write the number of an earlier message"
            raise TraceError(msg)
    parents = [_parent(node, number) for number, node in enumerate(nodes)]
    leaves = _leaves(parents)
    check_branches(len(leaves), origin)
    rejected = _rejected(nodes)
    branches = []
    for leaf in leaves:
        path = _path(parents, leaf)
        ids, mask, logprobs = (np.concatenate(arrays) for arrays in zip(*(own[i] for i in path), strict=True))
        if leaf in rejected:
            mask, logprobs = np.zeros_like(mask), np.zeros_like(logprobs)
        branches.append((ids, mask, logprobs))
    return branches


def prompt_of(nodes: object) -> list[Any]:
    """Return a graph's prompt: the tokens on the path to the first trained ones.

    The messages need not have been checked. One that only rejected summaries continue is not trained. Without a trained
    message, the path is the one to the first leaf. The prompt is empty if a message on the path has no token ids.
    """
    if not isinstance(nodes, list) or not nodes:
        return []
    given: list[Mapping[str, Any]] = [node if isinstance(node, dict) else {} for node in nodes]
    parents = [_parent(node, number) for number, node in enumerate(given)]
    leaves, rejected = _leaves(parents), _rejected(given)
    trained = set(leaves) - rejected
    for number in reversed(range(len(given))):
        if number in trained and (parent := parents[number]) is not None:
            trained.add(parent)
    masks = [mask if isinstance(mask := node.get("mask"), list) else [] for node in given]
    first = next((i for i, mask in enumerate(masks) if i in trained and True in mask), leaves[0])
    prompt: list[Any] = []
    for number in _path(parents, first):
        ids, mask = given[number].get("token_ids"), masks[number]
        if not isinstance(ids, list):
            return []
        prompt += ids[: mask.index(True)] if number == first and True in mask else ids
    return prompt


def _leaves(parents: Sequence[int | None]) -> list[int]:
    inner = set(parents)
    return [number for number in range(len(parents)) if number not in inner]


def _path(parents: Sequence[int | None], last: int) -> list[int]:
    """Return the messages from a root to `last`."""
    path = [last]
    while (before := parents[path[-1]]) is not None:
        path.append(before)
    return path[::-1]


def _parent(node: Mapping[str, Any], number: int) -> int | None:
    """Return the number of the message before; None for a root, or if it is no earlier message."""
    parent = node.get("parent")
    return parent if type(parent) is int and 0 <= parent < number else None


def _rejected(nodes: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return summaries that no message continued from, which verifiers skips."""
    links = [
        (number, link)
        for number, node in enumerate(nodes)
        if isinstance(given := node.get("semantic_parents"), list)
        for link in given
        if isinstance(link, dict)
    ]
    accepted = {node for _, link in links if link.get("type") == "compaction" and type(node := link.get("node")) is int}
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

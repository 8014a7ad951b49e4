"""Turns of a sample, read and sampled, as other formats list them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_actors.messages.samples import NOT_SAMPLED, TokenSequence, runs
from relax_actors.traces.model import TraceError

Array = NDArray[Any]
FIRST_VERSION = 0
"""Version of sampled tokens of another program, which has no versions of this run."""

MAX_TURNS, MAX_BRANCHES = 10_000, 500
"""Turns and branches of a trace of another program."""
RECORD = np.dtype([("token", "<i4"), ("logprob", "<f4"), ("sampled", "?")])
"""What is compared of a token of two branches; packed, so that equal records have equal bytes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation.

    Attributes:
        context: `[context] int32`, all tokens before it.
        tokens: `[len] int32`, the sampled tokens.
        logprobs: `[len] float32`.
        place: its place in a file, for errors.
    """

    context: Array
    tokens: Array
    logprobs: Array
    place: str = ""

    @property
    def whole(self) -> Array:
        """All tokens up to the end of the turn, `[context + len] int32`."""
        return np.concatenate([self.context, self.tokens])

    @property
    def digest(self) -> str:
        """Checksum of its tokens and log-probs."""
        parts = (self.context.tobytes(), self.tokens.tobytes(), (self.logprobs + np.float32(0)).tobytes())
        return xxhash.xxh3_128_hexdigest(b"".join((len(self.context).to_bytes(8), *parts)))


def turns_of(sequence: TokenSequence) -> list[Turn]:
    """Return the turns of a sequence."""
    spans = runs(sequence.sampled) if sequence.spans is None else sequence.spans
    return [
        Turn(sequence.token_ids[:begin], sequence.token_ids[begin:end], sequence.logprobs[begin:end])
        for begin, end in spans.tolist()
    ]


def sequences_of(turns: Sequence[Turn], masks: Sequence[Array] | None = None) -> tuple[TokenSequence, ...]:
    """Join turns to sequences: a turn whose context begins as an earlier one continues it.

    A turn with another context starts a new sequence, in which sampled tokens of other turns are context. A turn with
    the tokens and log-probs of an earlier one is the same turn. So every sampled token is trained once.

    Args:
        turns: the turns in order.
        masks: `[len] bool` of each turn, which of its tokens are trained; all if not given.

    Raises:
        TraceError: a turn trains a token that an earlier one trains, or has no tokens, or there are too many turns or
            branches.
    """
    if len(turns) > MAX_TURNS:
        msg = f"{turns[0].place}: {len(turns)} turns, more than {MAX_TURNS}; split the trace into samples"
        raise TraceError(msg)
    trained = [np.ones(len(turn.tokens), np.bool_) for turn in turns] if masks is None else masks
    chains: list[list[tuple[Turn, Array]]] = []
    ends: list[Array] = []  # all tokens of each chain
    for turn, mask in _distinct(turns, trained):
        last = next((i for i in reversed(range(len(ends))) if _begins(turn.context, ends[i])), None)
        if last is None:
            chains.append([(turn, mask)])
            ends.append(turn.whole)
            check_branches(len(chains), turn.place)
        else:
            chains[last].append((turn, mask))
            ends[last] = turn.whole
    return tuple(_joined(chain) for chain in chains)


def _distinct(turns: Sequence[Turn], masks: Sequence[Array]) -> list[tuple[Turn, Array]]:
    """Return each turn once, with a mask of all tokens that its copies train."""
    known: dict[str, tuple[Turn, Array]] = {}
    for turn, mask in zip(turns, masks, strict=True):
        if not len(turn.tokens):
            msg = f"{turn.place}: it has no completion tokens; record the token ids that the model sampled"
            raise TraceError(msg)
        if not len(turn.context):
            msg = f"{turn.place}: it has no prompt tokens; record the token ids that the model read"
            raise TraceError(msg)
        twin, kept = known.setdefault(key := turn.digest, (turn, np.zeros_like(mask)))
        if (kept & mask).any():
            msg = (
                f"{turn.place}: it has the tokens of {twin.place}, and would be trained twice; mark the copy as "
                "context (is_copied_context of ATIF, a loss_mask of 0 of OpenEnv), or remove it"
            )
            raise TraceError(msg)
        known[key] = (twin, kept | mask)
    return list(known.values())


def check_branches(count: int, where: str) -> None:
    """Raise TraceError if a sample has too many branches, which are compared with each other."""
    if count > MAX_BRANCHES:
        msg = f"{where}: more than {MAX_BRANCHES} branches, whose contexts differ; split the trace into samples"
        raise TraceError(msg)


def without_repeats(sequences: Iterable[TokenSequence]) -> tuple[TokenSequence, ...]:
    """Return branches that train each sampled token once, in the first of them.

    Branches hold the tokens before they part several times. In the later ones these tokens are context.
    """
    branches, known = list[TokenSequence](), list[bytes]()
    for sequence in sequences:
        own = _compared(sequence)
        place = bisect_left(known, own)
        # Of all strings, those beside it in sorted order share the longest beginning with it.
        mask = sequence.loss_mask.copy()
        mask[: max((_shared(other, own) for other in known[max(0, place - 1) : place + 1]), default=0)] = False
        known.insert(place, own)
        branches.append(
            TokenSequence(sequence.token_ids, mask, sequence.logprobs, sequence.versions, player=sequence.player)
        )
    return tuple(branches)


def _compared(sequence: TokenSequence) -> bytes:
    """Return what branches share by token: id, log-prob, and whether it was sampled."""
    records = np.zeros(len(sequence.token_ids), RECORD)
    records["token"], records["sampled"] = sequence.token_ids, sequence.sampled
    records["logprob"] = sequence.logprobs + np.float32(0)  # -0 equals 0
    return records.tobytes()


def _shared(one: bytes, other: bytes) -> int:
    """Return how many leading tokens two branches share."""
    n = min(len(one), len(other))
    same = np.frombuffer(one, np.uint8, n) == np.frombuffer(other, np.uint8, n)
    return (n if same.all() else int(np.argmin(same))) // RECORD.itemsize


def _begins(tokens: Array, first: Array) -> bool:
    """Return whether tokens begin with others; compares the last of these first."""
    n = len(first)
    return len(tokens) >= n and bool(tokens[n - 1] == first[-1]) and np.array_equal(tokens[:n], first)


def _joined(chain: Sequence[tuple[Turn, Array]]) -> TokenSequence:
    """Return the sequence of turns with their masks, each of which continues the one before."""
    tokens = chain[-1][0].whole
    wrote, trained = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.bool_)
    logprobs, spans = np.zeros(len(tokens), np.float32), []
    for turn, mask in chain:
        begin = len(turn.context)
        end = begin + len(turn.tokens)
        wrote[begin:end], trained[begin:end], logprobs[begin:end] = True, mask, turn.logprobs
        spans.append((begin, end))
    versions = np.where(wrote, FIRST_VERSION, NOT_SAMPLED).astype(np.int32)
    return TokenSequence(tokens, trained, logprobs, versions, np.array(spans, np.int32))

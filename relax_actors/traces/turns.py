"""Turns of a sample: what the model read and what it sampled each time, as formats of other programs list them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.messages.samples import NOT_SAMPLED, TokenSequence, runs
from relax_actors.traces.model import TraceError

Array = NDArray[Any]
FIRST_VERSION = 0
"""Version of sampled tokens of another program, which has no versions of this run."""


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


def turns_of(sequence: TokenSequence) -> list[Turn]:
    """Return the turns of a sequence."""
    spans = runs(sequence.sampled) if sequence.spans is None else sequence.spans
    return [
        Turn(sequence.token_ids[:begin], sequence.token_ids[begin:end], sequence.logprobs[begin:end])
        for begin, end in spans.tolist()
    ]


def sequences_of(turns: Sequence[Turn]) -> tuple[TokenSequence, ...]:
    """Join turns to sequences: a turn whose context begins with all tokens of an earlier turn continues it.

    A turn with another context starts a new sequence, in which sampled tokens of other turns are context. So every
    sampled token is trained once.

    Raises:
        TraceError: a turn repeats an earlier one, or has no tokens.
    """
    chains: list[list[Turn]] = []
    for number, turn in enumerate(turns):
        if not len(turn.tokens):
            msg = f"{turn.place}: it has no completion tokens; record the token ids that the model sampled"
            raise TraceError(msg)
        if not len(turn.context):
            msg = f"{turn.place}: it has no prompt tokens; record the token ids that the model read"
            raise TraceError(msg)
        if twin := next((each for each in turns[:number] if _same(each, turn)), None):
            msg = (
                f"{turn.place}: it has the tokens of {twin.place}, and would be trained twice; mark copied context as "
                "such, or remove it"
            )
            raise TraceError(msg)
        chain = next((each for each in reversed(chains) if _begins(turn.context, each[-1].whole)), None)
        if chain is None:
            chains.append([turn])
        else:
            chain.append(turn)
    return tuple(_joined(chain) for chain in chains)


def without_repeats(sequences: Iterable[TokenSequence]) -> tuple[TokenSequence, ...]:
    """Return branches of one sample with each sampled token trained once: in the first branch that has it.

    Branches hold the tokens before they part several times. In the later ones these tokens are context.
    """
    found: list[TokenSequence] = []
    for sequence in sequences:
        mask = sequence.loss_mask.copy()
        for earlier in found:
            mask[: _shared(earlier, sequence)] = False
        found.append(
            TokenSequence(sequence.token_ids, mask, sequence.logprobs, sequence.versions, player=sequence.player)
        )
    return tuple(found)


def _shared(one: TokenSequence, other: TokenSequence) -> int:
    """Return how many leading tokens two branches share: equal in token, log-prob and who wrote them."""
    n = min(len(one.token_ids), len(other.token_ids))
    same = (
        (one.token_ids[:n] == other.token_ids[:n])
        & (one.logprobs[:n] == other.logprobs[:n])
        & (one.sampled[:n] == other.sampled[:n])
    )
    return n if same.all() else int(np.argmin(same))


def _same(one: Turn, other: Turn) -> bool:
    pairs = ((one.context, other.context), (one.tokens, other.tokens), (one.logprobs, other.logprobs))
    return all(np.array_equal(own, others) for own, others in pairs)


def _begins(tokens: Array, first: Array) -> bool:
    return len(tokens) >= len(first) and np.array_equal(tokens[: len(first)], first)


def _joined(chain: Sequence[Turn]) -> TokenSequence:
    """Return the sequence of turns, each of which continues the one before."""
    tokens = chain[-1].whole
    wrote, logprobs = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32)
    spans = []
    for turn in chain:
        begin = len(turn.context)
        end = begin + len(turn.tokens)
        wrote[begin:end], logprobs[begin:end] = True, turn.logprobs
        spans.append((begin, end))
    versions = np.where(wrote, FIRST_VERSION, NOT_SAMPLED).astype(np.int32)
    return TokenSequence(tokens, wrote, logprobs, versions, np.array(spans, np.int32))

"""Laws of turns and branches: which sequence a turn continues, and which branch trains a token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.messages.samples import TokenSequence
from relax_actors.traces.turns import Turn, sequences_of, without_repeats

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5)


def turn(context: list[int], tokens: list[int]) -> Turn:
    arrays = (np.array(context, np.int32), np.array(tokens, np.int32))
    return Turn(*arrays, np.full(len(tokens), -0.5, np.float32))


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=12, unique_by=lambda pair: (tuple(pair[0]), tuple(pair[1]))))
def test_turn_continues_the_last_sequence_that_begins_its_context(pairs: list[tuple[list[int], list[int]]]) -> None:
    chains: list[list[int]] = []
    for context, tokens in pairs:
        begun = [i for i, own in enumerate(chains) if context[: len(own)] == own]
        if begun:
            chains[begun[-1]] = context + tokens
        else:
            chains.append(context + tokens)
    made = sequences_of([turn(context, tokens) for context, tokens in pairs])
    assert [sequence.token_ids.tolist() for sequence in made] == chains


@given(st.lists(st.tuples(TOKENS, st.lists(st.sampled_from([-0.5, -0.0, 0.0]), min_size=5, max_size=5)), max_size=12))
def test_first_branch_with_a_beginning_trains_it(branches: list[tuple[list[int], list[float]]]) -> None:
    sequences = []
    for ids, logprobs in branches:
        n = len(ids)
        versions = np.array([-1] + [0] * (n - 1), np.int32)
        own = np.array([0.0, *logprobs[1:n]], np.float32)
        sequences.append(TokenSequence(np.array(ids, np.int32), versions >= 0, own, versions))
    seen: set[tuple[tuple[int, float], ...]] = set()
    for (ids, _), before, made in zip(branches, sequences, without_repeats(sequences), strict=True):
        tokens = list(zip(ids, before.logprobs.tolist(), strict=True))
        beginnings = [tuple(tokens[: i + 1]) for i in range(len(tokens))]
        expected = [i > 0 and beginning not in seen for i, beginning in enumerate(beginnings)]
        assert made.loss_mask.tolist() == expected
        seen |= {*beginnings}

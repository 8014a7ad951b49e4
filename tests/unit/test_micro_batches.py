"""Laws of the cut of a step into micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.algorithms.micro_batches import micro_batches, row_parts

STEPS = st.integers(1, 64).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), max_size=40), st.just(budget))
)


@given(STEPS)
def test_every_sequence_is_in_exactly_one_micro_batch(step: tuple[list[int], int]) -> None:
    lengths, budget = step
    parts = micro_batches(lengths, token_budget=budget)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(parts)


@given(STEPS)
def test_every_micro_batch_fits_the_budget(step: tuple[list[int], int]) -> None:
    lengths, budget = step
    for part in micro_batches(lengths, token_budget=budget):
        assert sum(lengths[i] for i in part) <= budget
    for part in micro_batches(lengths, token_budget=budget, padded=True):
        assert max(lengths[i] for i in part) * len(part) <= budget


@given(STEPS)
def test_lengths_never_rise_and_ties_keep_their_order(step: tuple[list[int], int]) -> None:
    lengths, budget = step
    order = [i for part in micro_batches(lengths, token_budget=budget) for i in part]
    assert order == sorted(order, key=lambda i: (-lengths[i], i))


@given(STEPS, st.booleans())
def test_no_cut_of_the_sorted_lengths_has_fewer_micro_batches(step: tuple[list[int], int], padded: bool) -> None:  # noqa: FBT001
    lengths, budget = step

    def size(part: list[int]) -> int:
        return part[0] * len(part) if padded else sum(part)

    longest_first = sorted(lengths, reverse=True)
    fewest = [0]  # fewest[k]: micro-batches that the k longest sequences need, by trying every last one
    for end in range(1, len(lengths) + 1):
        starts = (s for s in range(end) if size(longest_first[s:end]) <= budget)
        fewest.append(1 + min(fewest[s] for s in starts))
    assert len(micro_batches(lengths, token_budget=budget, padded=padded)) == fewest[-1]


def test_sequences_of_like_length_share_a_micro_batch() -> None:
    assert micro_batches([2, 8, 3, 8, 1], token_budget=16) == [[1, 3], [2, 0, 4]]
    assert micro_batches([], token_budget=1) == []


def test_a_sequence_that_can_never_fit_is_named_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="sequence 1 has length 900, token_budget is 512; raise token_budget to 900"):
        micro_batches([3, 900], token_budget=512)
    with pytest.raises(ValueError, match="sequence 0 has length 0; leave"):
        micro_batches([0, 3], token_budget=512)


ROWS = st.integers(1, 64).flatmap(
    lambda budget: st.tuples(
        st.lists(st.lists(st.integers(1, budget), min_size=1, max_size=5), max_size=12), st.just(budget)
    )
)


@given(ROWS)
def test_rows_are_cut_in_order_into_parts_that_fit_and_cannot_be_longer(step: tuple[list[list[int]], int]) -> None:
    rows, budget = step
    parts = row_parts(rows, token_budget=budget)
    assert [i for part in parts for i in part] == list(range(len(rows)))

    def tokens(indices: range) -> int:
        return sum(length for i in indices for length in rows[i])

    for part in parts:
        assert len(part) == 1 or tokens(part) <= budget
        assert part.stop == len(rows) or tokens(range(part.start, part.stop + 1)) > budget


@given(ROWS)
def test_a_part_that_is_followed_by_another_does_not_change_when_rows_come(step: tuple[list[list[int]], int]) -> None:
    rows, budget = step
    parts = row_parts(rows, token_budget=budget)
    for n in range(len(rows)):
        closed = row_parts(rows[:n], token_budget=budget)[:-1]
        assert closed == parts[: len(closed)]

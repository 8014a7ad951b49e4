"""Properties of splitting a step into micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.algorithms.micro_batches import Shared, group_work, micro_batches, split_rows

STEPS = st.integers(1, 64).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), max_size=40), st.just(budget))
)


@given(STEPS)
def test_every_sequence_is_in_exactly_one_micro_batch(step: tuple[list[int], int]) -> None:
    lengths, budget = step
    parts = micro_batches(lengths, max_tokens=budget)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(parts)


@given(STEPS)
def test_every_micro_batch_fits_the_budget(step: tuple[list[int], int]) -> None:
    lengths, budget = step
    for part in micro_batches(lengths, max_tokens=budget):
        assert sum(lengths[i] for i in part) <= budget
    for part in micro_batches(lengths, max_tokens=budget, padded=True):
        assert max(lengths[i] for i in part) * len(part) <= budget


@given(STEPS)
def test_sequences_are_sorted_by_length_and_ties_keep_their_order(step: tuple[list[int], int]) -> None:
    lengths, budget = step
    order = [i for part in micro_batches(lengths, max_tokens=budget) for i in part]
    assert order == sorted(order, key=lambda i: (-lengths[i], i))


@given(STEPS, st.booleans())
def test_no_split_of_the_sorted_lengths_has_fewer_micro_batches(step: tuple[list[int], int], padded: bool) -> None:  # noqa: FBT001
    lengths, budget = step

    def size(part: list[int]) -> int:
        return part[0] * len(part) if padded else sum(part)

    longest_first = sorted(lengths, reverse=True)
    fewest = [0]  # fewest[k]: fewest micro-batches for the k longest sequences, over all choices of the last one
    for end in range(1, len(lengths) + 1):
        starts = (s for s in range(end) if size(longest_first[s:end]) <= budget)
        fewest.append(1 + min(fewest[s] for s in starts))
    assert len(micro_batches(lengths, max_tokens=budget, padded=padded)) == fewest[-1]


def test_sequences_of_similar_length_share_a_micro_batch() -> None:
    assert micro_batches([2, 8, 3, 8, 1], max_tokens=16) == [[1, 3], [2, 0, 4]]
    assert micro_batches([], max_tokens=1) == []


def test_sequence_above_the_limit_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"sequence 1 has 900 tokens; .* 512\. Raise .*max_tokens_per_microbatch to 900"
    ):
        micro_batches([3, 900], max_tokens=512)
    with pytest.raises(ValueError, match="sequence 0 has no tokens; leave"):
        micro_batches([0, 3], max_tokens=512)


ROWS = st.integers(1, 64).flatmap(
    lambda budget: st.tuples(
        st.lists(st.lists(st.integers(1, budget), min_size=1, max_size=5), max_size=12), st.just(budget)
    )
)


@given(ROWS)
def test_rows_are_split_in_order_into_maximal_parts_that_fit(step: tuple[list[list[int]], int]) -> None:
    rows, budget = step
    parts = split_rows(rows, max_tokens=budget)
    assert [i for part in parts for i in part] == list(range(len(rows)))

    def tokens(indices: range) -> int:
        return sum(length for i in indices for length in rows[i])

    for part in parts:
        assert len(part) == 1 or tokens(part) <= budget
        assert part.stop == len(rows) or tokens(range(part.start, part.stop + 1)) > budget


@given(ROWS)
def test_closed_parts_do_not_change_when_rows_are_added(step: tuple[list[list[int]], int]) -> None:
    rows, budget = step
    parts = split_rows(rows, max_tokens=budget)
    for n in range(len(rows)):
        closed = split_rows(rows[:n], max_tokens=budget)[:-1]
        assert closed == parts[: len(closed)]


@given(STEPS, st.integers(1, 5), st.data())
def test_groups_stay_together_and_their_shared_work_counts_once_a_micro_batch(
    step: tuple[list[int], int], groups: int, data: st.DataObject
) -> None:
    lengths, budget = step
    of = data.draw(st.lists(st.integers(0, groups - 1), min_size=len(lengths), max_size=len(lengths)))
    first = {group: of.index(group) for group in set(of)}
    prefixes = [
        0 if i == first[g] else data.draw(st.integers(0, n)) for i, (g, n) in enumerate(zip(of, lengths, strict=True))
    ]
    least = [data.draw(st.integers(0, length)) for length in lengths]
    tokens = {group: data.draw(st.integers(0, budget)) for group in range(groups)}
    shared = Shared(of, range(len(lengths)), prefixes, least, [{group: tokens[group]} for group in of])
    parts = micro_batches(lengths, max_tokens=budget, shared=shared)
    order = [i for part in parts for i in part]
    assert sorted(order) == list(range(len(lengths)))
    runs = [of[i] for n, i in enumerate(order) if n == 0 or of[order[n - 1]] != of[i]]
    assert len(runs) == len(set(runs))
    whole = 0
    for part in parts:
        own = [lengths[part[0]], *(max(lengths[i] - prefixes[i], least[i]) for i in part[1:])]
        cost = sum(own) + sum(tokens[group] for group in {of[i] for i in part})
        assert cost <= budget or len(part) == 1
        whole += cost
    assert sum(group_work(lengths, shared).values()) <= whole

"""Shares of the sources of a mixture."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.config.sources import exact_weights
from relax_actors.data.mixture import Plan, Shares


@st.composite
def weights(draw: st.DrawFn, most: int = 6) -> list[Fraction]:
    parts = draw(st.lists(st.integers(0, 60), min_size=1, max_size=most).filter(any))
    return [Fraction(part, sum(parts)) for part in parts]


@given(weights())
def test_each_source_is_within_one_row_of_its_share_after_any_number_of_rows(given_weights: list[Fraction]) -> None:
    shares = Shares(given_weights)
    counts = [0] * len(given_weights)
    for n in range(200):
        source, before = shares.at(n)
        assert before == counts[source]
        counts[source] += 1
        assert all(abs(count - (n + 1) * w) < 1 for count, w in zip(counts, given_weights, strict=True))
    assert shares.counts(200) == counts


@given(st.lists(st.tuples(st.integers(1, 50), weights(1).map(len)), min_size=1, max_size=4), st.integers(0, 300))
def test_plan_counts_what_it_assigns(lengths: list[tuple[int, int]], n: int) -> None:
    rng = np.random.default_rng(n)
    firsts = np.cumsum([0, *(length for length, _ in lengths)])[:-1].tolist()
    drawn = [rng.integers(1, 9, 3) for _ in firsts]
    plan = Plan([(f, [Fraction(int(p), int(d.sum())) for p in d]) for f, d in zip(firsts, drawn, strict=True)])
    counts = [0, 0, 0]
    for i in range(n):
        source, before = plan.at(i)
        assert before == counts[source]
        counts[source] += 1
    assert plan.counts(n) == counts


@pytest.mark.parametrize(
    ("sizes", "first", "every"),
    [([60, 40], 100, 100), ([6, 40], 10, 100), ([600, 4], 11, 1000), ([1, 1], 1, 2)],
)
def test_mixture_ends_with_the_first_source_or_with_all(sizes: list[int], first: int, every: int) -> None:
    plan = Plan([(0, [Fraction(3, 5), Fraction(2, 5)])])
    ends = plan.length(sizes, "first"), plan.length(sizes, "all")
    assert all(count <= size for count, size in zip(plan.counts(ends[0] or 0), sizes, strict=True))
    assert any(count > size for count, size in zip(plan.counts((ends[0] or 0) + 1), sizes, strict=True))
    assert all(count >= size for count, size in zip(plan.counts(ends[1] or 0), sizes, strict=True))
    assert any(count < size for count, size in zip(plan.counts((ends[1] or 0) - 1), sizes, strict=True))
    assert abs((ends[0] or 0) - first) <= 2
    assert abs((ends[1] or 0) - every) <= 2


def test_mixture_that_leaves_out_a_source_never_ends_with_all() -> None:
    plan = Plan([(0, [Fraction(1, 2), Fraction(1, 2)]), (8, [Fraction(1), Fraction(0)])])
    assert plan.length([100, 100], "all") is None
    assert plan.length([100, 100], "first") == 104


def test_weights_are_the_decimals_that_were_written() -> None:
    assert exact_weights({"a": 0.1, "b": 0.7, "c": 0.2}) == {
        "a": Fraction(1, 10),
        "b": Fraction(7, 10),
        "c": Fraction(1, 5),
    }


@pytest.mark.parametrize(
    ("given_weights", "error"),
    [
        (
            {"a": 0.6, "b": 0.3},
            r"^at: the weights add up to 0\.9, not to 1; for the same shares write 0\.6667, 0\.3333$",
        ),
        ({"a": 3, "b": 1}, r"add up to 4, not to 1; for the same shares write 0\.75, 0\.25$"),
        ({"a": 0.33333, "b": 0.66667}, r"^at: weight 0\.33333 of a has more than four decimals; round it$"),
        ({"a": 0}, r"add up to 0, not to 1; give at least one source a weight$"),
    ],
)
def test_weights_that_do_not_add_up_are_refused_with_the_right_ones(
    given_weights: dict[str, float], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        exact_weights(given_weights, "at: ")

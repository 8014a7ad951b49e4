"""Estimates of evaluations against their definitions."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.evaluation.estimates import majority_at_k, mcnemar, mean_interval, pass_at_k, wilson


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_choices_of_k_answers_that_contain_a_right_one(numbers: tuple[int, int, int]) -> None:
    n, c, k = numbers
    chosen = [any(i < c for i in each) for each in combinations(range(n), k)]
    assert pass_at_k(n, c, k) == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_numbers_out_of_range(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="need 0 <= c <= n"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("votes", "right", "k", "expected"),
    [
        ("aab", "a", 3, 1.0),
        ("abb", "a", 3, 0.0),
        ("ab", "a", 2, 0.5),
        ("abc", "c", 3, 1 / 3),
        ("aabb", "a", 2, 0.5),
        ("aabbc", "b", 2, 0.5),
        ("    a", "a", 5, 1.0),
        ("  ab", "a", 4, 0.5),
        ("   ", " ", 3, 1.0),
    ],
)
def test_majority_at_k_follows_the_most_frequent_answer_of_each_group(
    votes: str, right: str, k: int, expected: float
) -> None:
    read = [vote.strip() for vote in votes]
    assert majority_at_k(read, [vote == right for vote in votes], k) == pytest.approx(expected)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=9))
def test_majority_of_one_answer_is_the_accuracy(answers: list[tuple[str, bool]]) -> None:
    votes, passed = [vote for vote, _ in answers], [ok for _, ok in answers]
    assert majority_at_k(votes, passed, 1) == pytest.approx(sum(passed) / len(passed))


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_exactly_the_probabilities_within_z_standard_errors(numbers: tuple[int, int]) -> None:
    successes, n = numbers
    share = successes / n
    low, high = wilson(share, n)
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(share - end) == pytest.approx(1.959963984540054 * (end * (1 - end) / n) ** 0.5, rel=1e-6)


def test_wilson_interval_of_no_success_in_ten_trials_is_the_published_one() -> None:
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.27754), abs=1e-5)
    with pytest.raises(ValueError, match="n >= 1"):
        wilson(0.5, 0)


def test_interval_of_a_mean_is_two_standard_errors_wide_on_each_side() -> None:
    low, high = mean_interval([0.0, 1.0, 0.0, 1.0]) or (0, 0)
    assert (low + high) / 2 == pytest.approx(0.5)
    assert (high - low) / 2 == pytest.approx(1.95996 * (1 / 3 / 4) ** 0.5, rel=1e-4)
    assert mean_interval([1.0]) is None


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (6, 0, 0.03125), (9, 2, 0.0654), (30_000, 30_000, 1.0), (30_300, 29_700, 0.0144)],
)
def test_mcnemar_is_the_exact_binomial_test_of_the_prompts_that_changed(better: int, worse: int, p: float) -> None:
    assert mcnemar(better, worse) == pytest.approx(p, abs=1e-4)
    assert mcnemar(worse, better) == mcnemar(better, worse)

"""Fail fast: the first rows of an actor all fail with one error."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.subjects import RowId
from relax_actors.errors import RowError
from relax_actors.runtime.first_rows import FirstRows, first_rows, signature

LIMIT = 4


def error_of(function: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 any error will do
        function()
    return caught.value


def score(completion: str) -> float:
    if completion == "":
        msg = "nothing to score"
        raise ValueError(msg)
    return float(completion)


def parse(completion: str) -> object:
    return json.loads(completion)


def failure(text: str = "x") -> Exception:
    return error_of(lambda: score(text))


@pytest.mark.parametrize(("prompts", "limit"), [(1, 8), (4, 8), (8, 8), (12, 12), (16, 16), (512, 16)])
def test_limit_is_a_step_within_bounds(prompts: int, limit: int) -> None:
    assert first_rows(prompts) == limit


KINDS = pytest.mark.parametrize(("kind", "other"), [("group", "eval"), ("eval", "group")])


@KINDS
def test_run_stops_once_all_of_the_first_rows_failed_and_one_for_good(kind: str, other: str) -> None:
    del other
    rows = FirstRows(LIMIT)
    for attempt in range(2):
        failed = [rows.failed(RowId(0, i, kind), failure(f"{attempt}{i}x"), final=False) for i in range(LIMIT)]
        assert failed == [0] * LIMIT
    assert rows.failed(RowId(0, 0, kind), failure(), final=True) == LIMIT


def test_row_that_is_retried_counts_once() -> None:
    rows = FirstRows(LIMIT)
    assert not any(rows.failed(RowId(0, 0), failure(), final=True) for _ in range(10 * LIMIT))


@given(st.integers(0, 3 * LIMIT), st.integers(0, 3 * LIMIT))
def test_one_row_that_succeeds_keeps_the_run_up(before: int, after: int) -> None:
    rows = FirstRows(LIMIT)
    for i in range(min(before, LIMIT - 1)):
        assert not rows.failed(RowId(0, i), failure(), final=True)
    rows.succeeded("group")
    assert not any(rows.failed(RowId(1, i), failure(), final=True) for i in range(after))


@KINDS
@given(st.lists(st.sampled_from(["fails", "succeeds", "fails otherwise"]), max_size=3 * LIMIT))
def test_rows_of_the_other_kind_do_not_matter(kind: str, other: str, others: list[str]) -> None:
    """Held-out rows are scored by a function of their own, and are handled before the first training rows."""
    rows = FirstRows(LIMIT)
    for i, what in enumerate(others):
        if what == "succeeds":
            rows.succeeded(other)
        else:
            rows.failed(RowId(0, i, other), failure() if what == "fails" else error_of(lambda: parse("{")), final=True)
    failed = [rows.failed(RowId(0, i, kind), failure(), final=True) for i in range(LIMIT)]
    assert failed == [0] * (LIMIT - 1) + [LIMIT]


def test_another_error_keeps_the_run_up() -> None:
    rows = FirstRows(LIMIT)
    errors = [failure(), error_of(lambda: score(None))]  # type: ignore[arg-type]
    assert not any(rows.failed(RowId(0, i), errors[i % 2], final=True) for i in range(4 * LIMIT))


def test_signature_is_the_type_and_the_function_of_the_user() -> None:
    assert signature(failure("a")) == signature(failure("b")) == signature(failure(""))
    in_library = [error_of(lambda text=text: parse(text)) for text in ("", "{", "[1,")]  # type: ignore[misc]
    assert len({signature(error) for error in in_library}) == 1
    assert signature(in_library[0]) == ("json.decoder.JSONDecodeError", __file__, "parse")
    assert signature(in_library[0]) != signature(failure())
    assert signature(RowError("without a traceback")) == ("relax_actors.errors.RowError",)

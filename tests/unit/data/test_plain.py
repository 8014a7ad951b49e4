"""Whatever a data source yields becomes plain data that msgpack keeps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fractions import Fraction

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.data.plain import plain
from relax_actors.data.task import Task


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2, 3)), [1, [2, 3]]),
        ({3, 1, 2}, [1, 2, 3]),
        (frozenset({"b", 1, None}), ["b", 1, None]),
        ({1: "a", (2, 3): "b", None: "c"}, {"1": "a", "[2, 3]": "b", "None": "c"}),
        (np.float32(0.5), 0.5),
        (np.str_("x"), "x"),
        (np.bool_(1), True),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.datetime64("2024-01-02"), "2024-01-02"),
        (np.longdouble(1.5), 1.5),
        (datetime(2024, 1, 2, tzinfo=UTC), "2024-01-02T00:00:00+00:00"),
        (timedelta(minutes=1), 60.0),
        (Fraction(1, 3), "1/3"),
        (1 << 64, "18446744073709551616"),
        (Task("p"), {"prompt": "p", "answer": "", "metadata": {}, "origin": "", "media": [], "traces": []}),
        ("\ud800", "?"),
        (1j, "1j"),
    ],
)
def test_plain_data_is_what_a_reader_expects(value: object, expected: object) -> None:
    result = plain(value)
    assert (result, type(result)) == (expected, type(expected))


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.dates() | st.fractions()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(SCALARS, inner) | st.sets(SCALARS, max_size=4)
    ),
    max_leaves=10,
)


@given(VALUES)
def test_plain_data_survives_msgpack_and_is_its_own_plain_form(value: object) -> None:
    result = plain(value)
    assert msgpack.unpackb(msgpack.packb(result), strict_map_key=True) == result
    assert plain(result) == result

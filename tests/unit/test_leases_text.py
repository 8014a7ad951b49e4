"""Leases are shown as text whatever a client of the broker wrote into them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.monitoring.leases import activity, age, children_of, number

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(["rows", "waits_for", "doing_since", "since", "children", "incarnation"])


@given(st.dictionaries(FIELDS, VALUES))
def test_any_lease_has_a_text(lease: dict[str, Any]) -> None:
    assert age(lease).endswith(" s")
    assert activity(lease)
    assert isinstance(children_of(lease), dict)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "3", None, [1]])
def test_absurd_numbers_are_replaced_by_the_default(value: Any) -> None:
    assert number(value, 7.0) == 7.0


def test_activity_names_at_most_three_rows() -> None:
    rows = [f"group.1.{i}" for i in range(5)]
    assert activity({"rows": rows}) == "handling group.1.0, group.1.1, group.1.2 and 2 more"
    assert activity({"waits_for": "weights 3"}) == "waiting for weights 3"
    assert activity({"doing_since": time.time() - 5}).startswith("working for 5.")

"""Columns whose arrival triggers a row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.runtime import COLUMNS
from relax_actors.runtime.join import trigger_columns


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (("prompt",), ["prompt"]),
        (("trajectory",), ["trajectory"]),
        (("prompt", "trajectory"), ["trajectory"]),
        (("trajectory", "reward"), ["reward"]),
        (("reward", "trajectory", "prompt"), ["reward"]),
        (("trajectory", "reward", "advantage"), ["advantage"]),
        (("prompt", "own"), ["own"]),
        (("trajectory", "own"), ["trajectory", "own"]),
        (("reward", "own", "other"), ["reward", "own", "other"]),
    ],
)
def test_row_is_triggered_by_columns_that_no_other_column_implies(inputs: tuple[str, ...], expected: list[str]) -> None:
    assert trigger_columns(inputs) == expected


@given(st.sets(st.sampled_from([*COLUMNS, "own", "other"]), min_size=1))
def test_every_set_of_inputs_has_a_trigger(inputs: set[str]) -> None:
    assert set(trigger_columns(tuple(inputs))) <= inputs
    assert trigger_columns(tuple(inputs))

"""Row that a test of a role builds by hand."""

from __future__ import annotations

import numpy as np
import pytest

from broker.codec import MAX_CELL_BYTES
from relax_actors import Reward, Row


def test_a_row_made_by_hand_holds_arrays_of_any_size() -> None:
    large = np.zeros(MAX_CELL_BYTES // 4 + 1, np.float32)
    row = Row.of(values=large, reward=Reward(np.array([1.0], np.float32)))
    assert row.values is large
    assert row.reward.values.tolist() == [1.0]
    assert "values" in row
    assert "trajectory" not in row
    with pytest.raises(AttributeError, match="has no column 'trajectory'"):
        row.trajectory  # noqa: B018

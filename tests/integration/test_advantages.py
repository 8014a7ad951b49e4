"""The role advantages on a real server: the coefficient of the KL comes with the weights that sampled the row."""

from __future__ import annotations

import numpy as np
import pytest

from broker.subjects import RowId
from broker.table import Table
from relax_actors.errors import RowError
from relax_actors.messages import Advantage, Reward, Trajectory, Weights
from relax_actors.roles.advantages import Advantages
from relax_actors.runtime import Row
from tests.support.contexts import MakeContext
from tests.support.messages import assert_says

SETTINGS = (
    "algorithm.advantage=returns",
    "algorithm.scale=none",
    "algorithm.kl.place=reward",
    "algorithm.kl.kind=k1",
    "algorithm.kl.target=1",
    "roles.reference.replicas=1",
)


def test_adaptive_coefficient_is_that_of_the_weights_that_sampled_the_newest_token(
    make_context: MakeContext, table: Table
) -> None:
    role = Advantages()
    role.context = make_context("advantages", *SETTINGS)
    table.put(table.subjects.numbered("weights", 6), Weights(6, "", [], 1, kl_coefficient=0.9))
    table.put(table.subjects.numbered("weights", 7), Weights(7, "", [], 1, kl_coefficient=0.4))

    def handle(newest: int) -> Advantage:
        two = np.array([1, 1], np.int32)
        versions = np.array([6, newest], np.int32)
        trajectory = Trajectory(two, two, two, np.full(2, -1.0, np.float32), versions, ["", ""], ["stop"] * 2)
        reward, row = Reward(np.array([1.0, 0.0], np.float32)), RowId(8, newest)
        columns = {"reward": reward, "trajectory": trajectory, "reference": np.full(2, -1.5, np.float32)}
        for name, value in columns.items():
            table.put(table.subject(row, name), value)
        cells = {name: table.get(table.subject(row, name)) for name in columns}
        found = role.handle(Row(row, {name: cell.data for name, cell in cells.items() if cell}, table.store))
        assert isinstance(found, Advantage)
        return found

    found = handle(7)
    np.testing.assert_allclose(found.values, [1 - 0.4 * 0.5, -0.4 * 0.5], rtol=1e-6)
    assert found.kl == 0.5
    with pytest.raises(RowError) as refused:
        handle(8)
    assert_says(refused.value, "group.8.8", "weights 8")

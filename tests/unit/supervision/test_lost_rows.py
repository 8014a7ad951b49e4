"""Which rows a role has lost, from the columns of the table and how far its consumer is acknowledged."""

from __future__ import annotations

import pytest

from broker.subjects import RowId
from relax_actors.config import load_config
from relax_actors.roles import make_role, role_names
from relax_actors.supervision.lost_rows import Loss, Pool, loss, pool_of, unanswered
from tests.support.running import TINY

REWARD = Pool("reward", ("group", "eval"), ("prompt", "trajectory"), ("trajectory",), "reward")


def test_rows_with_all_inputs_and_no_result_are_unanswered() -> None:
    columns = {
        RowId(3, 0): {"prompt", "trajectory", "custom"},
        RowId(3, 1): {"prompt", "trajectory", "reward"},
        RowId(3, 2): {"prompt"},
        RowId(3, 3): {"trajectory"},
        RowId(3, 4): {"prompt", "trajectory", "dropped"},
        RowId(3, 5): {"prompt", "trajectory", "quarantined"},
        RowId(2, 0, "eval"): {"prompt", "trajectory"},
    }
    assert unanswered(REWARD, columns) == [RowId(2, 0, "eval"), RowId(3, 0)]


def test_rows_of_other_kinds_are_not_the_role_s() -> None:
    only_training = Pool("advantages", ("group",), ("reward",), ("reward",), "advantage")
    assert unanswered(only_training, {RowId(2, 0, "eval"): {"reward"}}) == []


@pytest.mark.parametrize(
    ("inputs", "redelivery", "acknowledged", "found"),
    [
        ([7], None, 6, None),  # not delivered yet, or being handled
        ([7], None, 7, Loss.FIRST),
        ([7], None, 900, Loss.FIRST),
        ([7, 12], None, 11, None),  # its last input is being handled
        ([7, 12], None, 12, Loss.FIRST),
        ([7], 20, 19, None),  # delivered again, and being handled
        ([7], 20, 20, Loss.SECOND),
    ],
)  # fmt: skip
def test_a_row_is_lost_when_all_its_messages_are_acknowledged(
    inputs: list[int], redelivery: int | None, acknowledged: int, found: Loss | None
) -> None:
    assert loss(inputs, redelivery, acknowledged) is found


def test_only_roles_of_a_pool_that_write_a_column_can_lose_rows() -> None:
    config = load_config(TINY, ["environment.name=none.Game", "gateway.port=0"])
    pools = {name: pool_of(config, name, make_role(config, name)) for name in role_names(config)}
    assert {name for name, pool in pools.items() if pool is not None} == {"rollout", "reward", "advantages"}

"""Results of the wrong length or type are refused where they are made, with the name of the role."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from broker.codec import encode
from broker.store import Store
from broker.subjects import RowId
from relax_actors.config import load_config
from relax_actors.errors import RowError
from relax_actors.messages import Advantage, Reward, Trajectory
from relax_actors.runtime import Role, Row
from relax_actors.runtime.result_check import ResultCheck
from tests.support.running import TINY

FLOATS = np.full(6, -0.5, np.float32)
TRAJECTORY = Trajectory(
    np.array([5], np.int32),
    np.array([2, 0, 4], np.int32),
    np.arange(6, dtype=np.int32),
    FLOATS,
    np.zeros(6, np.int32),
    ["a", "", "b"],
    ["stop", "abort", "length"],
    ["fingerprint"],
)
REWARD = Reward(np.array([1.0, 0.0, 0.0], np.float32))
TOKEN_REWARD = Reward(REWARD.values, {}, FLOATS, np.array([2, 0, 4], np.int32))
READ = {"trajectory": TRAJECTORY, "reward": REWARD, "token reward": TOKEN_REWARD}


class Scores(Role):
    """Role of a user; the tests set the column that it writes."""

    reads = ("trajectory",)


def check(
    tmp_path: Path, column: str, value: Any, *settings: str, reads: str = "trajectory", row: RowId = RowId(1, 2)
) -> None:
    cls = type("Scores", (Scores,), {"writes": column})
    context: Any = SimpleNamespace(config=load_config(TINY, list(settings)), role="scores")
    data = encode(READ[reads], "x.0#1")
    ResultCheck(cls(), context)(Row(row, {reads.removeprefix("token "): data}, Store(tmp_path / "store")), value)


SHAPED = "advantages.reads=shaped"
SAME = ": the same in every row, or set reward.components"
COMPONENTS = 'reward.components=["style"]'


@pytest.mark.parametrize(
    ("column", "value", "settings"),
    [
        ("shaped", [1, 0.5, np.float32(2)], [SHAPED]),
        ("shaped", np.zeros(3), [SHAPED]),
        ("reward", REWARD, []),
        ("reward", Reward(REWARD.values, {"style": REWARD.values}), [COMPONENTS]),
        ("reward", TOKEN_REWARD, []),
        ("reference", FLOATS, []),
        ("advantage", Advantage(REWARD.values, 0.3), []),
        ("advantage", Advantage(FLOATS, 0.3), []),
        ("trajectory", TRAJECTORY, []),
        ("shaped", "anything", []),
    ],
)
def test_results_that_fit_are_accepted(tmp_path: Path, column: str, value: Any, settings: list[str]) -> None:
    check(tmp_path, column, value, *settings)


def test_reward_of_a_held_out_row_needs_no_components(tmp_path: Path) -> None:
    """`eval.reward` has components of its own, or none."""
    held_out = RowId(1, 2, "eval")
    check(tmp_path, "reward", REWARD, COMPONENTS, row=held_out)
    check(tmp_path, "reward", Reward(REWARD.values, {"exact": REWARD.values}), row=held_out)


@pytest.mark.parametrize(
    ("column", "value", "setting", "message"),
    [
        ("shaped", [1.0, 2.0], SHAPED, "2 numbers for column shaped of group.1.2; expected 3, one per sample"),
        (
            "shaped",
            "good",
            SHAPED,
            "'good' (str) for column shaped of group.1.2; expected 3, one per sample, finite",
        ),
        (
            "shaped",
            [1.0, float("nan"), 1.0],
            SHAPED,
            "[1.0, nan, 1.0] (list) for column shaped of group.1.2; expected 3, one per sample, finite",
        ),
        ("shaped", None, SHAPED, "None (NoneType) for column shaped of group.1.2; expected 3, one per sample, finite"),
        (
            "shaped",
            [[1.0], [2.0], [3.0]],
            SHAPED,
            "[[1.0], [2.0], [3.0]] (list) for column shaped of group.1.2; expected 3, one per sample, finite",
        ),
        (
            "reward",
            Reward(np.ones(4, np.float32)),
            SHAPED,
            "4 numbers for column reward of group.1.2; expected 3, one per sample",
        ),
        (
            "reward",
            REWARD,
            COMPONENTS,
            "reward components [] for column reward of group.1.2; expected components ['style']" + SAME,
        ),
        (
            "reward",
            Reward(REWARD.values, {}, FLOATS, np.array([2, 2, 2], np.int32)),
            SHAPED,
            "token_values for samples of [2, 2, 2] tokens for column reward of group.1.2; expected [2, 0, 4]",
        ),
        ("reference", FLOATS[:5], SHAPED, "5 numbers for column reference of group.1.2; expected 6, one per token"),
        (
            "advantage",
            Advantage(FLOATS[:2], 0.0),
            SHAPED,
            "2 advantages for column advantage of group.1.2; expected 3, one per sample, or one per token",
        ),
        (
            "reward",
            [1.0, 2.0, 3.0],
            SHAPED,
            "a value of type list for column reward of group.1.2; expected relax_actors.messages.Reward",
        ),
        (
            "advantage",
            [1.0],
            SHAPED,
            "a value of type list for column advantage of group.1.2; expected relax_actors.messages.Advantage",
        ),
    ],
)
def test_result_that_does_not_fit_names_its_role(
    tmp_path: Path, column: str, value: Any, setting: str, message: str
) -> None:
    with pytest.raises(RowError) as caught:
        check(tmp_path, column, value, setting)
    assert str(caught.value) == f"role scores (Scores) returned {message}"


def test_advantages_fit_the_token_rewards_that_they_are_computed_from(tmp_path: Path) -> None:
    check(tmp_path, "advantage", Advantage(FLOATS, 0.3, lengths=TOKEN_REWARD.lengths), reads="token reward")
    with pytest.raises(RowError, match=r"5 advantages for column advantage of group\.1\.2; expected 3"):
        check(tmp_path, "advantage", Advantage(FLOATS[:5], 0.3), reads="token reward")


def test_role_that_reads_rewards_only_is_checked_against_them(tmp_path: Path) -> None:
    check(tmp_path, "shaped", [1.0, 2.0, 3.0], SHAPED, reads="reward")
    with pytest.raises(RowError, match=r"2 numbers for column shaped of group\.1\.2; expected 3"):
        check(tmp_path, "shaped", [1.0, 2.0], SHAPED, reads="reward")

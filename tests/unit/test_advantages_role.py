"""The role `advantages`: rewards of samples and tokens, and the components that every row of a run has."""

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
from relax_actors.messages import Advantage, Reward
from relax_actors.roles.advantages import Advantages
from relax_actors.runtime import Drop, Row
from tests.support.running import TINY

VALUES = np.array([1.0, 0.0, 0.0, 1.0], np.float32)


def advantages(tmp_path: Path, value: Any, *settings: str) -> Any:
    """Handle a row whose column `reward` holds a value."""
    role = Advantages()
    role.context = SimpleNamespace(config=load_config(TINY, list(settings)))  # type: ignore[assignment]
    column = role.inputs(role.context.config)[0]
    return role.handle(Row(RowId(1, 2), {column: encode(value, "reward.0#1")}, Store(tmp_path / "store")))


def test_rewards_of_samples_give_one_advantage_each(tmp_path: Path) -> None:
    found = advantages(tmp_path, Reward(VALUES))
    assert isinstance(found, Advantage)
    assert found.values.shape == (4,)
    assert found.reward == 0.5


def test_token_rewards_give_one_advantage_for_each_token(tmp_path: Path) -> None:
    tokens = np.zeros(8, np.float32)
    tokens[3] = 1.0
    found = advantages(tmp_path, Reward(VALUES, {}, tokens, np.full(4, 2, np.int32)))
    assert found.values.shape == (8,)
    assert found.values[2] == found.values[3]


def test_equal_rewards_are_dropped_unless_tokens_differ(tmp_path: Path) -> None:
    filtered, equal = "algorithm.filter_zero_variance=true", np.ones(4, np.float32)
    assert isinstance(advantages(tmp_path, Reward(equal), filtered), Drop)
    tokens = np.array([0.0, 0.5, 0.0, 0.0], np.float32)
    assert isinstance(advantages(tmp_path, Reward(equal, {}, tokens, np.ones(4, np.int32)), filtered), Advantage)


COMPONENTS = 'reward.components=["style", "answer"]'


def test_components_of_the_run_are_accepted_and_their_means_kept(tmp_path: Path) -> None:
    found = advantages(tmp_path, Reward(VALUES, {"answer": VALUES, "style": VALUES / 4}), COMPONENTS)
    assert found.components == {"answer": 0.5, "style": 0.125}


@pytest.mark.parametrize(
    ("estimator", "normalise", "expected"),
    [
        # RLOO: each reward minus the mean of the three others.
        ("rloo", "none", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        # Dr. GRPO: each reward minus the mean of all four.
        ("grpo", "none", [0.75, -0.25, -0.25, -0.25]),
        ("grpo", "std", [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_estimator_and_normalisation_are_those_of_the_configuration(
    tmp_path: Path, estimator: str, normalise: str, expected: list[float]
) -> None:
    settings = (f"advantages.estimator={estimator}", f"advantages.normalise={normalise}")
    found = advantages(tmp_path, Reward(np.array([1, 0, 0, 0], np.float32)), *settings)
    np.testing.assert_allclose(found.values, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("components", "settings"), [({"answer": VALUES}, [COMPONENTS]), ({"other": VALUES}, []), ({}, [COMPONENTS])]
)
def test_components_other_than_those_of_the_run_quarantine_the_row(
    tmp_path: Path, components: dict[str, Any], settings: list[str]
) -> None:
    with pytest.raises(RowError, match=r"column reward of group\.1\.2 has reward components .*the run has"):
        advantages(tmp_path, Reward(VALUES, components), *settings)


@pytest.mark.parametrize("value", [[1.0, float("nan")], ["x"], [], [[1.0]], {"a": 1}])
def test_column_without_one_finite_number_a_sample_quarantines_the_row(tmp_path: Path, value: Any) -> None:
    with pytest.raises(RowError, match="column shaped of group"):
        advantages(tmp_path, value, "advantages.reads=shaped")

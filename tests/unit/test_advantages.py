"""Advantages of a group: properties, hand-computed values, and the token form of estimators."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.algorithms.advantages import Rewards, group_advantages, has_signal, leave_one_out
from relax_actors.algorithms.estimators import load_estimator
from relax_actors.config.algorithm import AlgorithmSection
from relax_actors.errors import RowError
from relax_actors.messages import Reward
from relax_actors.roles.advantages import estimate_advantage

GROUPS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=24).map(lambda r: np.array(r, np.float32))


@given(GROUPS)
def test_advantages_of_a_group_have_mean_zero(rewards: Rewards) -> None:
    for advantages in (
        group_advantages(rewards, normalise="std"),
        group_advantages(rewards, normalise="none"),
        leave_one_out(rewards),
    ):
        assert advantages.dtype == np.float32
        assert advantages.shape == rewards.shape
        assert abs(advantages.mean(dtype=np.float64)) <= 1e-6 * max(1.0, float(np.abs(advantages).max()))


@given(GROUPS.filter(lambda rewards: float(rewards.max() - rewards.min()) > 0.1))
def test_normalised_advantages_have_sample_deviation_one(rewards: Rewards) -> None:
    advantages = group_advantages(rewards, normalise="std")
    assert advantages.std(ddof=1, dtype=np.float64) == pytest.approx(1.0, abs=1e-4)


@given(GROUPS)
def test_higher_reward_never_has_a_lower_advantage(rewards: Rewards) -> None:
    advantages = group_advantages(rewards, normalise="std")
    assert (np.diff(advantages[np.argsort(rewards, kind="stable")]) >= 0).all()


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 24))
def test_equal_rewards_give_exactly_zero_and_have_no_signal(reward: float, n: int) -> None:
    rewards = np.full(n, reward, np.float32)
    assert not group_advantages(rewards, normalise="std").any()
    assert not group_advantages(rewards, normalise="none").any()
    assert not leave_one_out(rewards).any()
    assert not has_signal(rewards)


def test_advantages_match_hand_computed_values() -> None:
    rewards = np.array([1, 0, 0, 1, 1], np.float32)
    deviation = np.sqrt(0.3)  # (3 * 0.4^2 + 2 * 0.6^2) / (5 - 1)
    signs = np.array([0.4, -0.6, -0.6, 0.4, 0.4])
    np.testing.assert_allclose(group_advantages(rewards, normalise="none"), signs, rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, normalise="std"), signs / (deviation + 1e-6), rtol=1e-6)
    np.testing.assert_allclose(leave_one_out(rewards), [0.5, -0.75, -0.75, 0.5, 0.5], rtol=1e-6)


@given(GROUPS)
def test_leave_one_out_subtracts_the_mean_of_the_others(rewards: Rewards) -> None:
    wide = rewards.astype(np.float64)
    expected = [wide[i] - np.delete(wide, i).mean() for i in range(len(wide))]
    np.testing.assert_allclose(leave_one_out(rewards), expected, rtol=1e-5, atol=1e-9)


def test_signal_is_a_difference_above_the_tolerance() -> None:
    assert has_signal(np.array([0, 1e-6], np.float32))
    assert not has_signal(np.array([0, 1e-6], np.float32), tolerance=1e-3)
    assert not has_signal(np.array([0.5], np.float32))


def test_rewards_that_are_not_finite_or_not_one_dimensional_are_refused() -> None:
    with pytest.raises(ValueError, match="reward 1 of 2 is nan"):
        group_advantages(np.array([0, np.nan], np.float32), normalise="std")
    with pytest.raises(ValueError, match="reward 0 of 1 is inf"):
        has_signal(np.array([np.inf], np.float32))
    with pytest.raises(ValueError, match=r"shape \[0\]"):
        leave_one_out(np.array([], np.float32))
    with pytest.raises(ValueError, match=r"shape \[2, 2\]"):
        leave_one_out(np.ones((2, 2), np.float32))


def reward(**fields: object) -> Reward:
    return Reward(np.array([1.0, 0.0], np.float32), **fields)


def test_token_rewards_use_the_token_form_of_grpo() -> None:
    token_values, lengths = np.array([0.5, 0.25, -1.0], np.float32), np.array([2, 1], np.int32)
    settings = AlgorithmSection(scale="none")
    given = reward(token_values=token_values, lengths=lengths)
    found = estimate_advantage(given, load_estimator("group"), settings, "column reward of group.1.2")
    np.testing.assert_allclose(found.values, [1.75 - 0.375, 1.25 - 0.375, -1.375], rtol=1e-6)
    assert found.reward == 0.5


def test_token_rewards_are_refused_by_an_estimator_without_a_token_form() -> None:
    settings, estimator = AlgorithmSection(advantage="rloo", scale="none"), load_estimator("rloo")
    assert estimate_advantage(reward(), estimator, settings, "").values.tolist() == [1.0, -1.0]
    given = reward(token_values=np.zeros(3, np.float32), lengths=np.array([2, 1], np.int32))
    with pytest.raises(RowError, match=r"column reward of group\.1\.2 has token_values.*'rloo' has no token form; set"):
        estimate_advantage(given, estimator, settings, "column reward of group.1.2")

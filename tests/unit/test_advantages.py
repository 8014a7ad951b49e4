"""Laws of the advantages of a group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_actors.algorithms.advantages import Rewards, group_advantages, has_signal, leave_one_out

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
def test_a_higher_reward_never_has_a_lower_advantage(rewards: Rewards) -> None:
    advantages = group_advantages(rewards, normalise="std")
    assert (np.diff(advantages[np.argsort(rewards, kind="stable")]) >= 0).all()


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 24))
def test_equal_rewards_give_exactly_zero_and_have_no_signal(reward: float, n: int) -> None:
    rewards = np.full(n, reward, np.float32)
    assert not group_advantages(rewards, normalise="std").any()
    assert not group_advantages(rewards, normalise="none").any()
    assert not leave_one_out(rewards).any()
    assert not has_signal(rewards)


def test_the_formulas_give_the_numbers_worked_by_hand() -> None:
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


def test_signal_is_a_difference_beyond_the_tolerance() -> None:
    assert has_signal(np.array([0, 1e-6], np.float32))
    assert not has_signal(np.array([0, 1e-6], np.float32), tolerance=1e-3)
    assert not has_signal(np.array([0.5], np.float32))


def test_rewards_that_are_not_finite_or_not_a_vector_are_refused() -> None:
    with pytest.raises(ValueError, match="reward 1 of 2 is nan"):
        group_advantages(np.array([0, np.nan], np.float32), normalise="std")
    with pytest.raises(ValueError, match="reward 0 of 1 is inf"):
        has_signal(np.array([np.inf], np.float32))
    with pytest.raises(ValueError, match=r"shape \[0\]"):
        leave_one_out(np.array([], np.float32))
    with pytest.raises(ValueError, match=r"shape \[2, 2\]"):
        leave_one_out(np.ones((2, 2), np.float32))

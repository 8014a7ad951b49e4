"""Estimators of one advantage a sample: properties, and the papers' equations worked by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from relax_actors.algorithms import shaping
from relax_actors.algorithms.advantages import Group
from relax_actors.algorithms.advantages.baselines import (
    best_worst,
    ema,
    greedy,
    group,
    length_weighted,
    mean_ratio,
    none,
    passk,
    reward,
    rloo,
)
from relax_actors.algorithms.advantages.components import decoupled
from relax_actors.algorithms.specs import advantage_spec
from relax_actors.testing import check_advantage, example_groups

Array = NDArray[Any]
GROUPS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=24).map(np.array)
LENGTHS = np.array([2, 0, 1])


def test_every_estimator_passes_the_checks_for_users() -> None:
    for function in (group, rloo, length_weighted, passk, mean_ratio, none, decoupled):
        check_advantage(function)
    check_advantage(group, scale="group_mean")
    for function in (greedy, reward, ema):
        check_advantage(function, zero_if_equal=False)


@given(GROUPS)
def test_advantages_of_a_group_have_mean_zero(rewards: Array) -> None:
    for advantages in (
        group(Group(rewards=rewards)),
        group(Group(rewards=rewards), scale="none"),
        rloo(Group(rewards=rewards)),
    ):
        assert abs(advantages.mean()) <= 1e-9 * max(1.0, float(np.abs(advantages).max()))


@given(GROUPS.filter(lambda rewards: float(rewards.max() - rewards.min()) > 0.1))
def test_scaled_advantages_have_sample_deviation_one(rewards: Array) -> None:
    assert group(Group(rewards=rewards)).std(ddof=1) == pytest.approx(1.0, abs=1e-4)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 24))
def test_equal_rewards_give_exactly_zero_and_have_no_signal(value: float, n: int) -> None:
    equal = Group(rewards=np.full(n, value), lengths=np.arange(n), components={"a": np.full(n, value)})
    for function in (group, rloo, length_weighted, passk, decoupled):
        assert not function(equal).any()
    assert not shaping.has_signal(equal.rewards)


def test_advantages_match_hand_computed_values() -> None:
    rewards = Group(rewards=np.array([1, 0, 0, 1, 1]))
    deviation = np.sqrt(0.3)  # (3 * 0.4^2 + 2 * 0.6^2) / (5 - 1)
    signs = np.array([0.4, -0.6, -0.6, 0.4, 0.4])
    np.testing.assert_allclose(group(rewards, scale="none"), signs, rtol=1e-12)
    np.testing.assert_allclose(group(rewards), signs / (deviation + 1e-6), rtol=1e-12)
    np.testing.assert_allclose(rloo(rewards), [0.5, -0.75, -0.75, 0.5, 0.5], rtol=1e-12)
    # MaxRL: (r - 0.6) / 0.6.
    np.testing.assert_allclose(mean_ratio(rewards), [2 / 3, -1, -1, 2 / 3, 2 / 3], rtol=1e-12)
    np.testing.assert_allclose(group(rewards, scale="group_mean"), mean_ratio(rewards), rtol=1e-12)
    assert passk(rewards).tolist() == [0.0] * 5  # a tie for the best


def test_pass_at_k_trains_the_best_sample_by_its_lead() -> None:
    found = Group(rewards=np.array([0.5, 3.0, 1.0]))
    assert passk(found).tolist() == [0.0, 2.0, 0.0]
    np.testing.assert_allclose(
        passk(found, scale="group_std", epsilon=0.5), [0.0, 2.0 / (np.std([0.5, 3, 1], ddof=1) + 0.5), 0.0]
    )


def test_mean_ratio_of_a_group_without_success_is_zero_and_refuses_negative_rewards() -> None:
    assert mean_ratio(Group(rewards=np.array([0.0, 0.0]))).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"^MaxRL .*rewards of at least 0; one is -1$"):
        mean_ratio(Group(rewards=np.array([2.0, -1.0])))
    with pytest.raises(ValueError, match=r'^scale "group_mean" needs rewards of at least 0; one is -1$'):
        group(Group(rewards=np.array([2.0, -1.0])), scale="group_mean")


def test_length_weighted_baseline_counts_trained_tokens() -> None:
    # OPO: (2 * 1 + 0 * 5 + 1 * 4) / 3 = 2; with the first token masked (1 * 1 + 1 * 4) / 2 = 2.5.
    rewards = np.array([1.0, 5.0, 4.0])
    assert length_weighted(Group(rewards=rewards, lengths=LENGTHS)).tolist() == [-1.0, 3.0, 2.0]
    mask = np.array([False, True, True])
    assert length_weighted(Group(rewards=rewards, lengths=LENGTHS, loss_mask=mask)).tolist() == [-1.5, 2.5, 1.5]
    empty = Group(rewards=rewards, lengths=LENGTHS, loss_mask=np.zeros(3, np.bool_))
    assert length_weighted(empty).tolist() == [0.0, 0.0, 0.0]


def test_greedy_baseline_is_subtracted_from_the_returns_of_tokens() -> None:
    # ReMax: sum of the rewards from the token on, minus the greedy sample's reward.
    tokens = np.array([0.5, 0.25, -1.0])
    found = greedy(Group(rewards=np.array([1.0, 0.0, 2.0]), lengths=LENGTHS, token_rewards=tokens, greedy_reward=0.75))
    assert found.tolist() == [1.0, 0.5, 0.25]
    assert greedy(Group(rewards=np.array([1.0, 0.75]), greedy_reward=0.75)).tolist() == [0.25, 0.0]
    with pytest.raises(ValueError, match=r"no greedy sample"):
        greedy(Group(rewards=np.ones(2)))


@pytest.mark.parametrize("function", [group, rloo])
def test_token_rewards_give_returns_minus_the_baseline(function: Callable[..., Array]) -> None:
    # Returns: 1 + 0.5 + 0.25 and 1 + 0.25 in sample 0, 0 - 1 in sample 2. Whole samples: 1.75, 0 and -1.
    tokens = np.array([0.5, 0.25, -1.0])
    given_ = Group(rewards=np.array([1.0, 0.0, 0.0]), lengths=LENGTHS, token_rewards=tokens)
    found = function(given_, scale="none")
    baseline = np.full(3, 0.25) if function is group else np.array([-0.5, -0.5, 0.875])
    np.testing.assert_allclose(found, np.array([1.75, 1.25, -1.0]) - baseline, rtol=1e-12)
    np.testing.assert_allclose(found[[0, 2]], function(Group(rewards=given_.totals), scale="none")[[0, 2]], rtol=1e-12)


def test_decoupled_components_are_normalised_each_on_its_own() -> None:
    # GDPO: component a is worth 1000 times b, yet both count alike; c is equal for all samples and adds nothing.
    a, b = np.array([1000.0, 0.0, 0.0, 1000.0]), np.array([0.0, 1.0, 1.0, 0.0])
    parts = {"a": a, "b": b, "c": np.full(4, 0.3)}
    given_ = Group(rewards=a + b + 0.3, components=parts)
    np.testing.assert_allclose(decoupled(given_, epsilon=1e-12), np.zeros(4), atol=1e-9)
    expected = 3.0 * (b - 0.5) / (b.std(ddof=1) + 1e-6) + (a - 500) / (a.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(decoupled(given_, weights={"b": 3.0}), expected, rtol=1e-12)
    with pytest.raises(ValueError, match=r"weight for 'd'.* a, b, c$"):
        decoupled(given_, weights={"d": 1.0})
    with pytest.raises(ValueError, match=r"no reward components .*reward.function"):
        decoupled(Group(rewards=a))


def test_signal_is_a_difference_above_the_tolerance() -> None:
    assert shaping.has_signal(np.array([0, 1e-6]))
    assert not shaping.has_signal(np.array([0, 1e-6]), tolerance=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": [0, np.nan]}, "reward 1 of 2 is nan; the reward role must return finite numbers"),
        ({"rewards": []}, "rewards have shape [0]; pass one number for each sample of the group"),
        ({"rewards": np.ones((2, 2))}, "rewards have shape [2, 2]; pass one number for each sample of the group"),
        ({"rewards": [1, 2], "lengths": [1]}, "lengths [1] do not give each of 2 samples a number of tokens"),
        (
            {"rewards": [1], "values": [1]},
            "a group has values, but no lengths; give the number of tokens of each sample",
        ),
        (
            {"rewards": [1], "lengths": [2], "values": [1]},
            "values have shape [1] or are not finite; give 2 numbers, one per token",
        ),
        (
            {"rewards": [1], "components": {"a": [1, 2]}},
            "component 'a' has shape [2] or is not finite; give 1 finite numbers",
        ),
        ({"rewards": [1], "greedy_reward": np.inf}, "the reward of the greedy sample is inf; it must be finite"),
    ],
)
def test_malformed_groups_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Group(**fields)


def test_needs_are_declared() -> None:
    assert advantage_spec(greedy).needs == ("greedy",)
    assert advantage_spec(group).min_samples == 2
    assert advantage_spec(lambda group: group.rewards).needs == ()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda group: group.rewards - group.rewards.mean(), "equal rewards must give advantages of exactly 0"),
        (lambda group: np.zeros(group.n + 1), "2 numbers were returned; return 1 or 3"),
        (lambda group: np.full(group.n, np.nan), "the result is not finite"),
        (lambda group: np.arange(group.n) * np.ptp(group.rewards), "in another order of the samples"),
        (lambda group: np.zeros((group.n, 1)), "return one dimension"),
    ],
)
def test_checks_for_users_name_what_does_not_hold(function: Callable[..., Array], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_advantage(function)


def test_example_groups_have_empty_masked_and_single_samples() -> None:
    groups = [found for _, found in example_groups()]
    assert {found.n for found in groups} == {1, 3, 5}
    assert any((found.token_counts == 0).any() for found in groups)
    assert any(not found.mask.all() for found in groups)


def test_best_and_worst_sample_are_a_pair_and_equal_rewards_make_none() -> None:
    assert best_worst(Group(rewards=np.array([0.5, 2.0, -1.0, 2.0, -1.0]))).tolist() == [0.0, 1.0, -1.0, 0.0, 0.0]
    assert best_worst(Group(rewards=np.full(3, 0.1))).tolist() == [0.0, 0.0, 0.0]

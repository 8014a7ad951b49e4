"""Advantages of Pass@k Training against all subsets of k samples, as the paper defines them (arXiv 2508.10751)."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from relax_actors.algorithms.advantages.baselines import group, pass_at_k
from relax_actors.algorithms.advantages.groups import Group


def of_subsets(rewards: list[float], k: int) -> np.ndarray:
    """Mean over the subsets with a sample of the subset's standardised reward, which is 1 with a correct sample."""
    subsets = list(combinations(range(len(rewards)), k))
    scores = np.array([max(rewards[i] for i in subset) for subset in subsets])
    standardised = (scores - scores.mean()) / (scores.std() + 1e-6)
    return np.array(
        [
            np.mean([s for s, subset in zip(standardised, subsets, strict=True) if i in subset])
            for i in range(len(rewards))
        ]
    )


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("correct", [0, 1, 2, 4, 6])
def test_advantage_is_the_mean_over_all_subsets_with_the_sample(k: int, correct: int) -> None:
    rewards = [1.0] * correct + [0.0] * (6 - correct)
    np.testing.assert_allclose(pass_at_k(Group(rewards=np.array(rewards)), pass_k=k), of_subsets(rewards, k), atol=1e-9)


def test_one_of_one_is_grpo_with_the_deviation_of_the_population() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.0])
    expected = group(Group(rewards=rewards), scale="none") / (rewards.std() + 1e-6)
    np.testing.assert_allclose(pass_at_k(Group(rewards=rewards), pass_k=1), expected, atol=1e-12)


def test_sample_is_correct_from_a_reward_on() -> None:
    shaped = pass_at_k(Group(rewards=np.array([0.9, 0.1, 0.6, 0.3])), pass_k=2, correct_reward=0.5)
    plain = pass_at_k(Group(rewards=np.array([1.0, 0.0, 1.0, 0.0])), pass_k=2)
    assert shaped.tolist() == plain.tolist()
    assert plain[0] > 0 > plain[1]


def test_group_in_which_every_subset_succeeds_has_no_signal() -> None:
    assert pass_at_k(Group(rewards=np.array([1.0, 1.0, 1.0, 0.0])), pass_k=2).tolist() == [0.0] * 4


def test_reward_of_exactly_the_correct_reward_is_correct_in_float32() -> None:
    # 0.9 in float32 is below 0.9 in float64.
    rewards = np.array([0.9, 0.0, 0.0, 0.9], np.float32)
    found = pass_at_k(Group(rewards=rewards), pass_k=2, correct_reward=0.9)
    assert found.tolist() == pass_at_k(Group(rewards=np.array([1.0, 0.0, 0.0, 1.0])), pass_k=2).tolist()

"""Advantages against the statements of TRL's trainers, to 1e-6 in float64.

Differences on purpose, each with its test:

- Equal rewards: exactly 0 here; in TRL rounding of the mean, divided by its epsilon.
- Group of one with `scale_rewards="group"`: 0 in both, as r - mean is 0.
- TRL's epsilon is 1e-4 everywhere; the tests set it here, where the default is 1e-6.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relax_actors.algorithms.advantages.baselines import group, rloo
from relax_actors.algorithms.advantages.components import decoupled
from relax_actors.algorithms.advantages.groups import Group
from relax_actors.algorithms.shaping import kl_rewards
from relax_actors.algorithms.step_statistics import RowAdvantages, scale_by_reward_std, whiten
from tests.parity.trl_source import function, require_trl, run

require_trl()
GRPO, RLOO = "trainer/grpo_trainer.py", "trainer/rloo_trainer.py"
EPSILON = 1e-4
Array = NDArray[Any]
nanstd = function("trainer/utils.py", "nanstd")


def rewards_of(seed: int, groups: int, n: int) -> Array:
    """Rewards `[groups, n]`: the first group equal, the others of several sizes."""
    source = np.random.default_rng(seed)
    rewards = source.normal(size=(groups, n)) * 10.0 ** source.integers(-2, 3, (groups, 1))
    rewards[0] = 0.5
    return rewards


def trl_grpo(
    rewards: Array, *, scale: str = "group", weights: Array | None = None, how: str = "sum_then_normalize"
) -> Array:
    """Advantages of TRL's GRPO, `[groups, n]`, from rewards `[groups, n]` or `[groups, n, functions]`."""
    per_function = torch.from_numpy(rewards.reshape(rewards.shape[0] * rewards.shape[1], -1).copy())
    count = per_function.shape[1]
    trainer = SimpleNamespace(
        multi_objective_aggregation=how,
        scale_rewards=scale,
        reward_weights=torch.ones(count, dtype=torch.float64) if weights is None else torch.from_numpy(weights),
        reward_funcs=[None] * count,
    )
    found = run(
        GRPO,
        "_generate_and_score_completions",
        "unscorable_mask =",
        "advantages = torch.nan_to_num",
        self=trainer,
        rewards_per_func=per_function,
        num_generations=rewards.shape[1],
        nanstd=nanstd,
        device="cpu",
    )
    return found["advantages"].numpy().reshape(rewards.shape[:2])


def trl_rloo(rewards: Array, *, beta: float = 0.0, normalise: bool = False, **tokens: Any) -> Array:
    """Advantages of TRL's RLOO, `[groups, n]`."""
    trainer = SimpleNamespace(
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_clip_range=None,
        beta=beta,
        normalize_advantages=normalise,
    )
    found = run(
        RLOO,
        "_generate_and_score_completions",
        "unscorable_mask =",
        "advantages = torch.nan_to_num",
        self=trainer,
        rewards_per_func=torch.from_numpy(rewards.reshape(-1, 1).copy()),
        num_generations=rewards.shape[1],
        nanstd=nanstd,
        device="cpu",
        gather=lambda tensor: tensor,
        **tokens,
    )
    return found["advantages"].numpy().reshape(rewards.shape)


def rows_of(values: Array, rewards: Array) -> list[RowAdvantages]:
    """Rows whose samples have one trained token each."""
    n = values.shape[1]
    one = np.ones(n, np.int64)
    return [
        RowAdvantages(values=v, lengths=one, mask=np.ones(n, np.bool_), rewards=r)
        for v, r in zip(values, rewards, strict=True)
    ]


@pytest.mark.parametrize("n", [2, 7, 8])
@pytest.mark.parametrize(("ours", "theirs"), [("group_std", "group"), ("none", "none")])
def test_group_advantages_are_those_of_trl(ours: Any, theirs: str, n: int) -> None:
    rewards = rewards_of(n, 5, n)
    found = [group(Group(rewards=own), scale=ours, epsilon=EPSILON) for own in rewards]
    np.testing.assert_allclose(found, trl_grpo(rewards, scale=theirs), rtol=1e-6, atol=1e-9)


def test_group_of_one_has_no_advantage_as_in_trl() -> None:
    assert group(Group(rewards=np.array([3.0])), epsilon=EPSILON).tolist() == [0.0]
    assert trl_grpo(np.array([[3.0]])).tolist() == [[0.0]]
    assert rloo(Group(rewards=np.array([3.0]))).tolist() == [0.0]
    assert trl_rloo(np.array([[3.0]])).tolist() == [[0.0]]


def test_equal_rewards_are_exactly_zero_where_trl_has_rounding() -> None:
    equal = np.full((1, 7), 0.7)
    assert not group(Group(rewards=equal[0]), epsilon=EPSILON).any()
    theirs = trl_grpo(equal.astype(np.float32), weights=np.ones(1, np.float32))
    assert 0 < np.abs(theirs).max() < 1e-2


def test_batch_scale_is_that_of_trl() -> None:
    rewards = rewards_of(3, 4, 6)
    centred = np.array([group(Group(rewards=own), scale="batch_std") for own in rewards])
    found = scale_by_reward_std(rows_of(centred, rewards), epsilon=EPSILON)
    np.testing.assert_allclose([row.values for row in found], trl_grpo(rewards, scale="batch"), rtol=1e-6, atol=1e-9)


def test_decoupled_components_are_those_of_trl() -> None:
    source = np.random.default_rng(5)
    parts, weights = source.normal(size=(4, 6, 3)), np.array([1.0, 0.5, 2.0])
    parts[1, :, 2] = 0.25  # a component that is equal within its group
    names = ["a", "b", "c"]
    sums = [
        decoupled(
            Group(rewards=own.sum(-1), components=dict(zip(names, own.T, strict=True))),
            weights=dict(zip(names, weights.tolist(), strict=True)),
            epsilon=EPSILON,
        )
        for own in parts
    ]
    found = whiten(rows_of(np.array(sums), parts.sum(-1)), over="samples", epsilon=EPSILON)
    theirs = trl_grpo(parts, weights=weights, how="normalize_then_sum")
    np.testing.assert_allclose([row.values for row in found], theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("n", [2, 5])
def test_leave_one_out_is_that_of_trl(n: int) -> None:
    rewards = rewards_of(n, 4, n)
    np.testing.assert_allclose([rloo(Group(rewards=own)) for own in rewards], trl_rloo(rewards), rtol=1e-6, atol=1e-9)


def test_normalised_leave_one_out_is_that_of_trl() -> None:
    rewards = rewards_of(11, 4, 5)
    values = np.array([rloo(Group(rewards=own)) for own in rewards])
    found = whiten(rows_of(values, rewards), over="samples", epsilon=EPSILON)
    theirs = trl_rloo(rewards, normalise=True)
    np.testing.assert_allclose([row.values for row in found], theirs, rtol=1e-6, atol=1e-9)


def test_kl_in_the_reward_is_that_of_trl_with_ragged_and_empty_samples() -> None:
    source, n = np.random.default_rng(8), 4
    rewards, lengths = source.normal(size=(1, n)), np.array([3, 0, 5, 2])
    old, reference = source.normal(size=(2, n, 5))
    mask = np.arange(5) < lengths[:, None]
    mask[2, 1] = False  # a token that the model did not write
    kl = kl_rewards(old[mask], reference[mask], coefficient=0.05, mask=np.ones(int(mask.sum()), np.bool_))
    sums = np.bincount(np.nonzero(mask)[0], weights=kl, minlength=n)
    tokens = {
        "old_per_token_logps": torch.from_numpy(old),
        "ref_per_token_logps": torch.from_numpy(reference),
        "completion_mask": torch.from_numpy(mask),
    }
    theirs = trl_rloo(rewards, beta=0.05, **tokens)
    np.testing.assert_allclose([rloo(Group(rewards=rewards[0] + sums))], theirs, rtol=1e-6, atol=1e-12)

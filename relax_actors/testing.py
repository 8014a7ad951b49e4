"""Checks of a user's own functions: `check_advantage` and `check_policy_loss`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.algorithms.advantages.examples import example_groups
from relax_actors.algorithms.advantages.groups import Group
from relax_actors.algorithms.policy_check import check_policy_loss
from relax_actors.algorithms.specs import settings_accepted

__all__ = ["check_advantage", "check_policy_loss", "example_groups"]

Array = NDArray[Any]
_TOLERANCE = 1e-9


def check_advantage(
    function: Callable[..., Array], *, zero_if_equal: bool = True, in_order: bool = False, **settings: Any
) -> None:
    """Check an advantage estimator on groups of several sizes, masks and rewards.

    The estimator must return one finite number for each sample or each token, leave its input unchanged, give the same
    numbers when called again, and give each sample the same advantages in any order of the samples.

    Args:
        function: the estimator.
        zero_if_equal: whether equal rewards must give exactly 0.
        in_order: whether the order of the samples matters, so that it is not checked.
        settings: values of settings of [algorithm]; those that the estimator has a parameter for are passed.

    Raises:
        AssertionError: a property does not hold; the text names it and the group.
    """
    bound = settings_accepted(function, settings)
    for name, group in example_groups():
        before = _copy(group)
        values = np.asarray(function(group, **bound))
        _check_shape(values, group, name)
        for field, array in _arrays(before).items():
            assert np.array_equal(array, getattr(group, field)), f"{name}: the estimator changed {field} of its input"
        assert np.array_equal(values, function(group, **bound)), f"{name}: a second call gave other numbers"
        if zero_if_equal and group.rewards.min() == group.rewards.max() and not group.has_token_rewards:
            assert not values.any(), f"{name}: equal rewards must give advantages of exactly 0, not {values[:8]}"
        if not in_order:
            _check_order(function, bound, group, values, name)


def _check_shape(values: Array, group: Group, name: str) -> None:
    sizes = (group.n, int(group.token_counts.sum()))
    assert values.ndim == 1, f"{name}: the result has shape {list(values.shape)}; return one dimension"
    assert len(values) in sizes, f"{name}: {len(values)} numbers were returned; return {sizes[0]} or {sizes[1]}"
    assert np.isfinite(values).all(), f"{name}: the result is not finite: {values[:8]}"


def _check_order(function: Callable[..., Array], bound: dict[str, Any], group: Group, values: Array, name: str) -> None:
    order = list(range(group.n))[::-1]
    again = np.asarray(function(group.select(order), **bound))
    parts = _per_sample(values, group)
    expected = np.concatenate([parts[i] for i in order]) if order else values
    assert np.allclose(again, expected, rtol=_TOLERANCE, atol=_TOLERANCE), (
        f"{name}: in another order of the samples they get other advantages"
    )


def _per_sample(values: Array, group: Group) -> list[Array]:
    if len(values) == group.n:
        return [values[i : i + 1] for i in range(group.n)]
    return np.split(values, np.cumsum(group.token_counts)[:-1])


def _arrays(group: Group) -> dict[str, Array]:
    names = ("rewards", "lengths", "loss_mask", "token_rewards", "values", "logprobs", "squares")
    return {name: getattr(group, name) for name in names if getattr(group, name) is not None}


def _copy(group: Group) -> Group:
    return group.select(range(group.n))

"""Checks of a user's own algorithm functions, for the user's tests: `check_advantage` and `check_policy_loss`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.algorithms.advantages.groups import Group, accepted_settings
from relax_actors.algorithms.policy_check import check_policy_loss

__all__ = ["check_advantage", "check_policy_loss", "example_groups"]

Array = NDArray[Any]
_TOLERANCE = 1e-9


def check_advantage(
    function: Callable[..., Array], *, zero_if_equal: bool = True, in_order: bool = False, **settings: Any
) -> None:
    """Check an advantage estimator on groups of several sizes, with empty and masked samples and equal rewards.

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
    bound = accepted_settings(function, settings)
    for name, group in example_groups():
        before = _copy(group)
        found = np.asarray(function(group, **bound))
        _check_shape(found, group, name)
        for field, array in _arrays(before).items():
            assert np.array_equal(array, getattr(group, field)), f"{name}: the estimator changed {field} of its input"
        assert np.array_equal(found, function(group, **bound)), f"{name}: a second call gave other numbers"
        if zero_if_equal and group.rewards.min() == group.rewards.max() and not group.has_token_rewards:
            assert not found.any(), f"{name}: equal rewards must give advantages of exactly 0, not {found[:8]}"
        if not in_order:
            _check_order(function, bound, group, found, name)


def example_groups() -> Iterator[tuple[str, Group]]:
    """Yield named groups with all inputs that an estimator can need: ragged, empty, masked, equal, of one sample."""
    source = np.random.default_rng(0)
    for n in (1, 3, 5):
        lengths = np.array([3, 0, 6, 1, 4][:n])
        # In float64, the mean of three times 0.1 is not 0.1.
        for kind, rewards in (("equal rewards", np.full(n, 0.1)), ("rewards", np.abs(source.normal(size=n)))):
            yield f"group of {n}, {kind}", _group(source, rewards, lengths, masked=False)
            yield f"group of {n}, {kind}, masked tokens", _group(source, rewards, lengths, masked=True)


def _group(source: np.random.Generator, rewards: Array, lengths: Array, *, masked: bool) -> Group:
    total = int(lengths.sum())
    mask = source.random(total) < 0.6 if masked else np.ones(total, np.bool_)  # noqa: PLR2004 a share of the tokens
    squares = source.uniform(0.1, 0.9, total)
    return Group(
        rewards=rewards,
        lengths=lengths,
        loss_mask=mask,
        values=source.normal(size=total),
        logprobs=np.log(squares),
        squares=squares,
        components={"first": rewards / 2, "second": rewards / 2},
        greedy_reward=0.7,
        role="player",
    )


def _check_shape(found: Array, group: Group, name: str) -> None:
    sizes = (group.n, int(group.token_counts.sum()))
    assert found.ndim == 1, f"{name}: the result has shape {list(found.shape)}; return one dimension"
    assert len(found) in sizes, f"{name}: {len(found)} numbers were returned; return {sizes[0]} or {sizes[1]}"
    assert np.isfinite(found).all(), f"{name}: the result is not finite: {found[:8]}"


def _check_order(function: Callable[..., Array], bound: dict[str, Any], group: Group, found: Array, name: str) -> None:
    order = list(range(group.n))[::-1]
    again = np.asarray(function(group.select(order), **bound))
    parts = _per_sample(found, group)
    expected = np.concatenate([parts[i] for i in order]) if order else found
    assert np.allclose(again, expected, rtol=_TOLERANCE, atol=_TOLERANCE), (
        f"{name}: in another order of the samples they get other advantages"
    )


def _per_sample(found: Array, group: Group) -> list[Array]:
    if len(found) == group.n:
        return [found[i : i + 1] for i in range(group.n)]
    return np.split(found, np.cumsum(group.token_counts)[:-1])


def _arrays(group: Group) -> dict[str, Array]:
    names = ("rewards", "lengths", "loss_mask", "token_rewards", "values", "logprobs", "squares")
    return {name: getattr(group, name) for name in names if getattr(group, name) is not None}


def _copy(group: Group) -> Group:
    return group.select(range(group.n))

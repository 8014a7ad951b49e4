"""Advantage estimators: advantages of one group of samples from its rewards.

Computed in float64 and rounded once at the end, so the result does not depend on the machine of the role. A group of
one sample, or with equal rewards, has advantages of exactly 0.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float32]
Advantages = NDArray[np.float32]
Normalise = Literal["std", "none"]


def group_advantages(rewards: Rewards, *, normalise: Normalise, epsilon: float = 1e-6) -> Advantages:
    """Compute group-relative advantages: GRPO, or Dr. GRPO without normalisation.

    - "std": `(r - mean) / (std + epsilon)`, GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2). The paper does not
      define the standard deviation; this is the sample standard deviation (divisor n - 1), as in TRL and verl.
    - "none": `r - mean`, Dr. GRPO (arXiv 2503.20783).

    Args:
        rewards: `[n] float32`.
        normalise: "std" or "none".
        epsilon: added to the standard deviation.

    Returns:
        Advantages, `[n] float32`.

    Raises:
        ValueError: the rewards are not one-dimensional, empty, or not finite.
    """
    values = _checked(rewards)
    if values.min() == values.max():
        return np.zeros(len(values), np.float32)
    centred = values - values.mean()
    if normalise == "std":
        centred /= values.std(ddof=1) + epsilon
    advantages: Advantages = centred.astype(np.float32)
    return advantages


def leave_one_out(rewards: Rewards, *, normalise: Normalise = "none") -> Advantages:
    """Compute RLOO advantages: each reward minus the mean of the other `n - 1` rewards (arXiv 2402.14740).

    Args:
        rewards: `[n] float32`.
        normalise: "none" as in the paper; "std" also divides by the sample standard deviation plus 1e-6.

    Returns:
        Advantages, `[n] float32`.

    Raises:
        ValueError: as `group_advantages`.
    """
    values = _checked(rewards)
    if values.min() == values.max():
        return np.zeros(len(values), np.float32)
    others = (values.sum() - values) / (len(values) - 1)
    centred = values - others
    if normalise == "std":
        centred /= values.std(ddof=1) + 1e-6
    advantages: Advantages = centred.astype(np.float32)
    return advantages


def token_advantages(
    rewards: Rewards, token_rewards: Rewards, lengths: NDArray[np.integer[Any]], *, normalise: Normalise
) -> Advantages:
    """Compute advantages of single tokens from the rewards of samples and of their tokens; the token form of GRPO.

    The return of a token is the reward of its sample plus the token rewards from this token to the end of the sample.
    The advantage is this return minus the mean return of the samples in the group; "std" divides it by the standard
    deviation of the returns of the samples plus 1e-6. If all token rewards are 0 the result is exactly that of
    `group_advantages`. This is the process supervision of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.3) with
    returns in place of normalised rewards.

    Args:
        rewards: `[n] float32`, one for each sample.
        token_rewards: `[total] float32`, tokens of all samples end to end.
        lengths: `[n]` integers, tokens of each sample.
        normalise: "std" or "none", as in `group_advantages`.

    Returns:
        Advantages, `[total] float32`.

    Raises:
        ValueError: shapes do not match, or a number is not finite.
    """
    outcome, steps = _checked(rewards), np.asarray(token_rewards, np.float64)
    if len(lengths) != len(outcome) or int(np.sum(lengths)) != len(steps) or not np.isfinite(steps).all():
        msg = (
            f"{len(steps)} token rewards, lengths {list(lengths[:8])} and {len(outcome)} rewards do not match, or a "
            "token reward is not finite"
        )
        raise ValueError(msg)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    cumulative = np.concatenate([[0.0], np.cumsum(steps)])
    totals = outcome + cumulative[bounds[1:]] - cumulative[bounds[:-1]]
    if not steps.any():
        return np.repeat(group_advantages(rewards, normalise=normalise), lengths)
    ends = np.repeat(cumulative[bounds[1:]], lengths)
    returns = np.repeat(outcome, lengths) + ends - cumulative[:-1]
    centred = returns - totals.mean()
    if normalise == "std" and len(totals) > 1:
        centred /= totals.std(ddof=1) + 1e-6
    advantages: Advantages = centred.astype(np.float32)
    return advantages


def has_signal(rewards: Rewards, tolerance: float = 1e-8) -> bool:
    """Return whether any two rewards of a group differ by more than `tolerance`; otherwise all advantages are 0.

    Args:
        rewards: `[n] float32`.
        tolerance: largest difference that counts as equal.

    Raises:
        ValueError: as `group_advantages`.
    """
    values = _checked(rewards)
    return bool(values.max() - values.min() > tolerance)


def _checked(rewards: Rewards) -> NDArray[np.float64]:
    values = np.asarray(rewards, np.float64)
    if values.ndim != 1 or not len(values):
        msg = f"rewards have shape {list(values.shape)}; pass one number for each sample of the group"
        raise ValueError(msg)
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        msg = f"reward {index} of {len(values)} is {values[index]}; the reward role must return finite numbers"
        raise ValueError(msg)
    return values

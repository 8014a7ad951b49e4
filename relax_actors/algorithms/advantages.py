"""Advantages of the samples of one group, from their rewards alone.

Computed in float64 and rounded once at the end, so the result does not depend on where the role runs. A group of
one sample, or one whose rewards are all equal, has nothing to compare: its advantages are exactly 0.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float32]
Advantages = NDArray[np.float32]
Normalise = Literal["std", "none"]


def group_advantages(rewards: Rewards, *, normalise: Normalise, epsilon: float = 1e-6) -> Advantages:
    """Group-relative advantages `[n] float32` of `rewards [n] float32`.

    "std" is GRPO, `(r - mean) / (std + epsilon)` (DeepSeekMath, arXiv 2402.03300, section 4.1.2). The paper does not
    say which standard deviation; this is the sample's (divisor n - 1), as in TRL and verl. "none" is Dr. GRPO,
    `r - mean` (arXiv 2503.20783). Raises ValueError when the rewards are not one-dimensional, empty or not finite.
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
    """RLOO advantages `[n] float32`: each reward minus the mean of the other `n - 1` (arXiv 2402.14740).

    With "std" they are divided by the sample's standard deviation, as in `group_advantages`, which the paper does not.
    Raises ValueError as `group_advantages` does.
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
    """Advantages of single tokens `[total] float32`, from rewards of samples and of their tokens.

    The return of a token is its sample's reward plus the token rewards from this token to the sample's end. From it
    the mean return of the group's samples is subtracted, and with "std" the difference is divided by the standard
    deviation of these returns plus 1e-6. Token rewards of 0 give `group_advantages` exactly. This is GRPO's process
    supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.3) with returns in place of normalised rewards.

    Args:
        rewards: `[n] float32`, one for each sample.
        token_rewards: `[total] float32`, tokens of all samples end to end.
        lengths: `[n]`, tokens of each sample.
        normalise: "std" or "none", as in `group_advantages`.

    Raises:
        ValueError: shapes do not fit each other, or a number is not finite.
    """
    outcome, steps = _checked(rewards), np.asarray(token_rewards, np.float64)
    if len(lengths) != len(outcome) or int(np.sum(lengths)) != len(steps) or not np.isfinite(steps).all():
        msg = (
            f"{len(steps)} token rewards, lengths {list(lengths[:8])} and {len(outcome)} rewards must fit and be finite"
        )
        raise ValueError(msg)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    so_far = np.concatenate([[0.0], np.cumsum(steps)])
    totals = outcome + so_far[bounds[1:]] - so_far[bounds[:-1]]
    if not steps.any():
        return np.repeat(group_advantages(rewards, normalise=normalise), lengths)
    ends = np.repeat(so_far[bounds[1:]], lengths)
    returns = np.repeat(outcome, lengths) + ends - so_far[:-1]
    centred = returns - totals.mean()
    if normalise == "std" and len(totals) > 1:
        centred /= totals.std(ddof=1) + 1e-6
    advantages: Advantages = centred.astype(np.float32)
    return advantages


def has_signal(rewards: Rewards, tolerance: float = 1e-8) -> bool:
    """Whether any two of `rewards [n] float32` differ by more than `tolerance`; if not, the row teaches nothing.

    Raises ValueError as `group_advantages` does.
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

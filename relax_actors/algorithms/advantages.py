"""Advantages of the samples of one group, from their rewards alone.

Computed in float64 and rounded once at the end, so the result does not depend on where the role runs. A group of
one sample, or one whose rewards are all equal, has nothing to compare: its advantages are exactly 0.
"""

from __future__ import annotations

from typing import Literal

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

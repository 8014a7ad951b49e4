r"""Advantages of turns, each compared with the turns of the same number: for episodes whose turns have own rewards.

Turns of different numbers are not comparable: a first turn may be harder than a last one, and returns shrink as an
episode goes on. A baseline that they share would reward every easy turn, wrong ones included. Computed in float64.
Masked tokens have advantage 0.
"""

from __future__ import annotations

import numpy as np

from relax_actors.algorithms.advantages.baselines import Scale, divisor
from relax_actors.algorithms.advantages.groups import Array, Group, requires
from relax_actors.algorithms.advantages.returns import discounted_sums, time_step_rewards

TOLERANCE = 1e-6
"""Returns that differ by less, relative to the largest, are equal: sums of float32 rewards of tokens are not exact."""


@requires("tokens", min_samples=2, per_token=True)
def turn(group: Group, *, scale: Scale = "group_std", epsilon: float = 1e-6) -> Array:
    r"""Subtract the mean return of the turns of the same number, and divide by the pooled standard deviation.

    $A_{i,k} = \frac{G_{i,k} - \bar{G}_k}{\sigma + \epsilon}$ with
    $\sigma^2 = \frac{1}{N - K} \sum_{i,k} (G_{i,k} - \bar{G}_k)^2$ over the returns $G_{i,k}$ of turn k of sample i:
    N turns with K different numbers. Samples of one turn each get the advantages of `group`. A turn that only one
    sample has reached has advantage 0. It is the advantage of `environment.credit = "turn"` and, with the sequences of
    a sample in place of turns, of "branch"; `environment.discount` is that of a turn. Without rewards of turns, all
    turns of a sample have its reward.

    Args:
        group: rewards `[n]`, tokens, and token rewards `[total]` and turns `[total]` if there are any.
        scale: as in `group`; "group_mean" is the mean of all turns.
        epsilon: added to the standard deviation.

    Returns:
        `[total] float64`.
    """
    totals = discounted_sums(group, time_step_rewards(group), 1.0)
    found, mask = np.zeros(len(totals)), group.mask
    if not mask.any():
        return found
    turns, samples = group.turn_numbers[mask], group.spread(np.arange(group.n))[mask]
    _, first = np.unique(samples * (turns.max() + 1) + turns, return_index=True)
    returns, numbers = totals[mask][first], turns[first]
    counts = np.maximum(np.bincount(numbers), 1)
    baseline = np.bincount(numbers, returns) / counts
    errors = returns - baseline[numbers]
    slack = TOLERANCE * np.abs(returns).max()
    differ = np.bincount(numbers, np.abs(errors) > slack) > 0
    if not differ.any():
        return found
    if scale == "group_std":
        free = len(returns) - len(np.unique(numbers))
        by = float(np.sqrt(np.sum(errors[differ[numbers]] ** 2) / free) + epsilon)
    else:
        by = divisor(returns, scale, epsilon)
    found[mask] = np.where(differ[turns], (totals[mask] - baseline[turns]) / by, 0.0)
    return found

r"""Advantages of turns, normalised over all turns of a group: for episodes whose turns have rewards of their own.

A turn is a run of trained tokens that ends where the model reads again, or where a token has a reward. Computed in
float64. Masked tokens have advantage 0.
"""

from __future__ import annotations

import numpy as np

from relax_actors.algorithms.advantages.baselines import Scale, divisor
from relax_actors.algorithms.advantages.groups import Array, Group, requires, sample_slices
from relax_actors.algorithms.advantages.returns import discounted_sums, time_step_rewards


@requires("tokens", min_samples=2, per_token=True)
def turn(group: Group, *, scale: Scale = "group_std", epsilon: float = 1e-6) -> Array:
    r"""Subtract the mean return of all turns of the group, and divide by their standard deviation.

    $A_{i,k} = \frac{G_{i,k} - \operatorname{mean}(G)}{\operatorname{std}(G) + \epsilon}$ over the returns $G_{i,k}$ of
    all turns k of all samples i: process supervision of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.3) with
    returns in place of sums of normalised rewards. Set `environment.credit = "turn"`; `environment.discount` is that of
    a turn. Without rewards of turns, all turns of a sample have its reward.

    Args:
        group: rewards `[n]`, tokens, and token rewards `[total]` if there are any.
        scale: as in `group`; the statistics are those of the turns.
        epsilon: added to the standard deviation.

    Returns:
        `[total] float64`.
    """
    steps = time_step_rewards(group)
    totals = discounted_sums(group, steps, 1.0)
    found = np.zeros(len(totals))
    first = _first_tokens(group)
    if not len(first):
        return found
    returns = totals[first]
    if returns.min() == returns.max():
        return found
    mask = group.mask
    found[mask] = (totals[mask] - returns.mean()) / divisor(returns, scale, epsilon)
    return found


def _first_tokens(group: Group) -> Array:
    """Return the first token of each turn, `[turns] int64`."""
    mask, rewards = group.mask, group.token_rewards
    found = []
    for part in sample_slices(group.token_counts):
        tokens = np.flatnonzero(mask[part]) + part.start
        if not len(tokens):
            continue
        begins = np.diff(tokens, prepend=tokens[0] - 2) > 1
        if rewards is not None:
            begins[1:] |= rewards[tokens[:-1]] != 0
        found.append(tokens[begins])
    return np.concatenate(found) if found else np.zeros(0, np.int64)

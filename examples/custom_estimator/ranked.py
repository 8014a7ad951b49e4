"""An advantage estimator that uses the ranks of the rewards instead of their values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relax_actors import AdvantageSpec, Group


@AdvantageSpec(min_samples=2)
def ranked(group: Group) -> NDArray[np.float64]:
    """Return ranks scaled to -1 to 1, `[n] float64`; equal rewards share their mean rank.

    Args:
        group: the samples of one prompt; `group.totals` are their rewards.
    """
    rewards = group.totals
    below = (rewards[:, None] > rewards[None, :]).sum(1)
    above = (rewards[:, None] < rewards[None, :]).sum(1)
    return (below - above) / max(1, group.n - 1)

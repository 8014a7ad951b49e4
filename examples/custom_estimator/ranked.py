"""An advantage estimator that uses the ranks of the rewards instead of their values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ranked(rewards: NDArray[np.float32], *, normalise: str) -> NDArray[np.float32]:
    """Return ranks scaled to -1 to 1, `[n] float32`; equal rewards share their mean rank.

    Args:
        rewards: `[n] float32`, rewards of the samples of one row.
        normalise: `advantages.normalise`; ranks need no normalisation.
    """
    del normalise
    below = (rewards[:, None] > rewards[None, :]).sum(1)
    above = (rewards[:, None] < rewards[None, :]).sum(1)
    return ((below - above) / max(1, len(rewards) - 1)).astype(np.float32)

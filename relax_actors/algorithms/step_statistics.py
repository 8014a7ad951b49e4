"""Normalisation of advantages with statistics of the whole step, computed by the trainer from the rows of its batch.

Pure and in float64 over the rows in the order of the batch cell, so that a replayed step gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, assert_never

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
StepNormalisation = Literal["none", "std", "whiten"]


def normalise_step(rows: Sequence[Array], *, kind: StepNormalisation, epsilon: float = 1e-8) -> list[Array]:
    """Normalise the advantages of a step.

    "none" returns the rows as they are. "std" divides by the standard deviation over the step; with group means
    subtracted before, it is the batch-level deviation of "Tricks or Traps?" (arXiv 2508.08221, section 4.1). "whiten"
    subtracts the mean and divides (REINFORCE++, arXiv 2501.03262, equation 6). The deviation has divisor n - 1. Where
    all numbers are equal "std" leaves them, and "whiten" gives exactly 0.

    Args:
        rows: one array for each row of the step, `[m] float32`: one number a sample, or one a trained token.
        kind: which normalisation.
        epsilon: added to the deviation.

    Returns:
        Arrays of the shapes of `rows`, float32.
    """
    if kind == "none" or not rows:
        return list(rows)
    flat = np.concatenate(rows).astype(np.float64)
    deviation = flat.std(ddof=1) if len(flat) > 1 and flat.min() != flat.max() else 0.0
    match kind:
        case "std":
            flat = flat / (deviation + epsilon) if deviation else flat
        case "whiten":
            flat = (flat - flat.mean()) / (deviation + epsilon) if deviation else np.zeros_like(flat)
        case _:
            assert_never(kind)
    return np.split(flat.astype(np.float32), np.cumsum([len(row) for row in rows])[:-1])

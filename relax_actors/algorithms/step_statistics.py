"""Normalisation of advantages with statistics of the whole step, which the trainer applies to the rows of its batch.

Computed in float64 over the rows in the order of the batch cell, so a replayed step gives the same bits.
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

    The standard deviation has divisor n - 1.

    - "none": unchanged.
    - "std": `a / (std + epsilon)`. With group means subtracted before, this is batch-level normalisation as in "Tricks
      or Traps?" (arXiv 2508.08221, section 4.1). Equal advantages are unchanged.
    - "whiten": `(a - mean) / (std + epsilon)`, REINFORCE++ (arXiv 2501.03262, equation 6). Equal advantages become
      exactly 0.

    Args:
        rows: one array for each row of the step, `[m] float32`: one value a sample, or one a trained token.
        kind: which normalisation.
        epsilon: added to the standard deviation.

    Returns:
        One array for each row, `[m] float32`.
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

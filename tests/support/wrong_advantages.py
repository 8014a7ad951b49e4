"""Advantage estimators of a careless user."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_actors.algorithms.advantages.groups import Group

Array = NDArray[Any]


def of_pairs(group: Group) -> Array:
    """Return two numbers for each sample."""
    return np.zeros((group.n, 2))


def not_a_number(group: Group) -> Array:
    """Return nan for the first sample."""
    return np.where(np.arange(group.n) == 0, np.nan, 0.0)


def scaled(group: Group, *, gamma: float, gae_lambda: float) -> Array:
    """Read settings that have no default of their own."""
    return group.rewards * gae_lambda + gamma
